"""The parts of a job that a script has made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from pipectl.errors import CaptureError
from pipectl.faults import is_user_code
from pipectl.script.hooks import Loading, Seen
from pipectl.script.loops import interval_of_trainer
from pipectl.script.optimizers import (
    Schedules,
    cut_down,
    follows_evaluations,
    moved,
    schedules_of,
    steps_with_optimizer,
)
from pipectl.script.order import (
    Collate,
    Told,
    batch_size_of,
    datasets_of,
    held_out_samples,
    samplers_of,
    samples_of,
    size_of_first_batch,
)
from pipectl.script.program import (
    BATCH,
    Entry,
    Outer,
    Program,
    State,
    name_of,
    parts,
    reach,
    rebuilt,
)
from pipectl.script.recorder import Recording, at
from pipectl.script.remainders import steps_rest
from pipectl.script.rounds import batches_of
from pipectl.script.run import Command, run_script
from pipectl.script.values import named

_UNFOLLOWED = {"item", "__float__", "__int__", "__index__"}
_ADD_NOTHING = ("accelerate", "lightning", "lightning_fabric", "mmengine", "pytorch_lightning")
"""Libraries whose optimizers only step those of torch."""
_MAKE = (
    "make tensors of samples (by a tokenizer, torch.tensor or torch.from_numpy) in the Dataset or "
    "the collate_fn, not in the loop; or "
)
_WRAP = """let a DataLoader give it, so that pipectl can draw samples. Tensors as samples:
    dataset = torch.utils.data.TensorDataset(x, y)
a list of pairs of tensors is a dataset as it is (pad sequences to one length). Windows of a text:
    class Windows(torch.utils.data.Dataset):
        def __len__(self): return len(data) - block_size
        def __getitem__(self, i):
            return data[i : i + block_size], data[i + 1 : i + 1 + block_size]
    dataset = Windows()
and train with it:
    loader = torch.utils.data.DataLoader(dataset, batch_size=batch_size, shuffle=True)
    for x, y in loader: ..."""


class Modules(nn.Module):
    """The modules that a script calls one by one, as one model.

    Args:
        modules: by name.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


@dataclass(frozen=True)
class Parts:
    """What a script has made, up to its first optimizer step.

    Args:
        command: that started it.
        seen: what the hooks have seen.
        model: the smallest module that holds all modules of the step.
        program: from a batch to the loss.
        loading: of the training data.
    """

    command: Command
    seen: Seen
    model: nn.Module
    program: Program
    loading: Loading

    @classmethod
    def of(cls, command: Command) -> Parts:
        """Run a script, and take its parts.

        Raises:
            CaptureError: the script fails, or does what no pipeline can follow.
        """
        parts = cls.taken(command, run_script(command))
        _reset(parts.seen, parts.model)
        parts.loading.data.restore()
        return parts

    @classmethod
    def taken(cls, command: Command, seen: Seen) -> Parts:
        """Take the parts of a script that has come to its first step.

        Raises:
            CaptureError: see :meth:`of`.
        """
        recordings = seen.recorder.recordings
        first = recordings[0]
        loading = _loading_of(seen, first)
        _refuse_batch_behind(loading, first)
        _refuse_other_optimizers(seen)
        _refuse_optimizer_within(seen)
        _refuse_closure_of(seen)
        model = model_of(seen, first)
        _refuse_untrained(seen, model)
        program = program_of(first, model)
        _refuse_unfollowed(program)
        _refuse_clips(seen, model)
        return cls(command, seen, model, program, loading)

    @property
    def loader(self) -> DataLoader[Any]:
        """The loader of the training data."""
        return self.loading.loader

    @property
    def optimizer(self) -> Optimizer:
        """The script's own."""
        assert self.seen.optimizer is not None
        return self.seen.optimizer

    @cached_property
    def schedules(self) -> list[Any]:
        """Its learning-rate schedules."""
        return schedules_of(self.seen)

    @property
    def accumulation(self) -> int:
        """Batches of the loader in one optimizer step."""
        return len(self.seen.recorder.recordings)

    @cached_property
    def batch_size(self) -> int:
        """Samples of the loader's batches."""
        size = batch_size_of(self.loader)
        return size_of_first_batch(self.loader) if size is None else int(size)

    @property
    def samples_per_step(self) -> int:
        """Samples of an optimizer step."""
        return self.batch_size * self.accumulation

    def dataset(self) -> Any:
        """Return the training data, in the script's order."""
        inputs, targets = self.program.batch_leaves()
        collate = Collate(self.loader.collate_fn, inputs, targets, self.seen.place)
        return samples_of(
            self.loader,
            collate,
            self.loading.start,
            self.told_epochs,
            repeats=id(self.loader) in self.seen.cycled,
            between=self.command.drawn_between_epochs,
        )

    @property
    def told_epochs(self) -> list[Told]:
        """How the script calls ``set_epoch`` of samplers and datasets of the loader."""
        own = {id(x) for x in (*samplers_of(self.loader), *datasets_of(self.loader))}
        return [told for told in self.seen.epochs.values() if id(told.owner) in own]

    def held_out(self, name: str) -> Any:
        """Return the samples of another loader, each once, by the name of its variable.

        Raises:
            CaptureError: there is no such loader by the first step.
        """
        scopes = ({**scope, **own} for _, scope, own, _ in self.seen.frames)
        found = [named(name, each) for each in scopes]
        loader = next((each for each in found if isinstance(each, DataLoader)), None)
        if loader is None:
            raise CaptureError(
                f"evaluation.data: {self.command.file} has no DataLoader {name!r} when its "
                "optimizer steps for the first time",
                hint="name the variable of one that it makes before, such as val_loader, "
                "self.val_loader or loaders['val']; or name a function that returns the dataset",
            )
        inputs, targets = self.program.batch_leaves()
        collate = Collate(loader.collate_fn, inputs, targets, self.seen.place)
        return held_out_samples(loader, collate)

    def loss(self, *, adds_up: bool) -> Callable[[Any, Any], Tensor]:
        """Return the script's loss, called with outputs and targets.

        It holds the model and the program alone, because a capture looks at the state of all that a
        loss holds.

        Args:
            adds_up: whether the losses of micro-batches are added up, as the script adds up the
                gradients of several backwards; otherwise these are means.
        """
        factor = 1 if adds_up else self.accumulation
        return partial(self.program.loss, self.model, factor)

    def make_optimizer(
        self, own: Mapping[str, nn.Parameter], sizes: Mapping[str, Sequence[int]] | None = None
    ) -> Optimizer:
        """Return the script's optimizer for some parameters, by their names in the model.

        Args:
            sizes: of the script's own ones, if they have others for a while.
        """
        ids = {name: id(tensor) for name, tensor in self.originals.items()}
        tensors = {ids[name]: tensor for name, tensor in own.items()}
        usual = None if sizes is None else {ids[name]: sizes[name] for name in own}
        return cut_down(self.optimizer, tensors, usual)

    @cached_property
    def originals(self) -> dict[str, nn.Parameter]:
        """The parameters that the script's optimizer holds, by name."""
        return dict(self.model.named_parameters())

    def make_schedules(self, optimizer: Any, epoch: Callable[[], int | None] | None = None) -> Any:
        """Return the script's learning-rate schedules for an optimizer; None if it has none.

        Args:
            epoch: returns the steps of an epoch, if that is another one than the script's.

        Raises:
            CaptureError: one of them follows what the job does not evaluate.
        """
        if not self.schedules:
            return None
        followers = list(filter(follows_evaluations, self.schedules))
        if not followers:
            every = [(each, self.steps_between(each, epoch)) for each in self.schedules]
            return Schedules(every, optimizer)
        place = at(self.seen.made[id(followers[0])][1])
        if len(self.schedules) > 1:
            raise CaptureError(
                f"{place}: this schedule follows a metric, and the script has others besides",
                hint="write one schedule of your own under lr_scheduler in the job",
            )
        if followers[0].mode != "min":
            raise CaptureError(
                f"{place}: this schedule follows a metric that rises, and pipectl gives schedules "
                "the loss of evaluations",
                hint="let it follow the loss (mode='min'), or name another schedule under "
                "lr_scheduler in the job",
            )
        return moved(followers[0], optimizer)

    def steps_between(self, schedule: Any, epoch: Callable[[], int | None] | None = None) -> int:
        """Optimizer steps between two steps of a schedule: 1, or those of an epoch.

        Args:
            epoch: see :meth:`make_schedules`.

        Raises:
            CaptureError: these are not known.
        """

        def of_epoch() -> int:
            return (epoch and epoch()) or self.steps_per_epoch

        known = interval_of_trainer(self.seen.frames, schedule, of_epoch)
        if known is not None:
            return known
        if steps_with_optimizer(self.seen, schedule) is not False:
            return 1
        return of_epoch()

    @cached_property
    def batches(self) -> int | None:
        """Batches of the loader in an epoch; None if they are not known before it ends."""
        return batches_of(self.loader)

    @property
    def batches_left(self) -> int:
        """Batches at the end of an epoch that are fewer than those of a step."""
        return (self.batches or 0) % self.accumulation

    @cached_property
    def steps_rest(self) -> bool | None:
        """Whether the script makes a step of these; None if it does not say."""
        return steps_rest(self.seen.frames, self.loading.places, self.optimizer, self.batches or 0)

    @property
    def leaves_rest(self) -> bool:
        """Whether it leaves them out."""
        return self.batches_left > 0 and self.steps_rest is False

    @property
    def known_steps_per_epoch(self) -> int | None:
        """Optimizer steps of an epoch, in the script and in the job; None if they are not known."""
        if self.batches is None:
            return None
        rest = bool(self.batches_left) and not self.leaves_rest
        return max(self.batches // self.accumulation + rest, 1)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch, in the script and in the job.

        Raises:
            CaptureError: they are not known.
        """
        known = self.known_steps_per_epoch
        if known is None:
            raise CaptureError(
                f"{at(self.loading.place)}: how many batches an epoch has is not known before it "
                "ends, and a schedule steps after every epoch",
                hint="give the dataset a __len__ and the DataLoader no more than one worker; step "
                "the schedule after every step of the optimizer; or name another one under "
                "lr_scheduler in the job",
            )
        return known


def program_of(recording: Recording, model: nn.Module) -> Program:
    """Return a recording whose modules and parameters are named by their paths in the model."""
    names = {id(m): name for name, m in model.named_modules()}
    states: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        states[id(tensor)] = name
    entries = [_named(entry, names, states) for entry in recording.entries]
    return Program(entries, recording.loss)


def _named(entry: Entry, names: Mapping[int, str], states: Mapping[int, str]) -> Entry:
    def change(item: Any) -> Any:
        if isinstance(item, Outer) and id(item.tensor) in states:
            return State(states[id(item.tensor)])
        return item

    target = entry.target
    if isinstance(target, nn.Module):
        target = names.get(id(target), target)
    return Entry(
        target,
        rebuilt(entry.args, change),
        rebuilt(entry.kwargs, change),
        entry.place,
        entry.with_grad,
        entry.autocast,
        entry.is_random,
        entry.writes,
    )


def _loading_of(seen: Seen, recording: Recording) -> Loading:
    if not recording.batches:
        calls = [entry for entry in recording.entries if entry.is_module]
        place = calls[0].place if calls else recording.place
        raise CaptureError(
            f"{at(place)}: the model is called with data that no DataLoader has given",
            hint=(_MAKE if seen.loadings else "") + _WRAP,
        )
    if len(recording.batches) > 1:
        raise CaptureError(
            f"{at(recording.place)}: the loss reads {len(recording.batches)} batches",
            hint="let one Dataset give what belongs together (both images of a pair, say), and "
            "compute a loss from one batch",
        )
    return seen.loadings[recording.batches[0]]


def _refuse_batch_behind(loading: Loading, recording: Recording) -> None:
    """Refuse batches whose samples are in another dimension than the first, or in none."""
    dataset: Any = loading.loader.dataset
    size = loading.loader.batch_size
    if size is None:
        return
    is_sized = isinstance(dataset, Sized) and not isinstance(dataset, IterableDataset)
    size = min(size, len(dataset)) if is_sized else size
    needed = Program(recording.entries, recording.loss).needed
    refs = (ref for index in needed for ref in recording.entries[index].refs)
    for path in dict.fromkeys(ref.path for ref in refs if ref.entry == BATCH):
        leaf = reach(recording.batch, path)
        if not isinstance(leaf, Tensor) or leaf.shape[:1] == (size,):
            continue
        is_of_sample = any(
            isinstance(each, list | tuple) and len(each) == size
            for each in (reach(recording.batch, path[:depth]) for depth in range(len(path)))
        )
        if size in leaf.shape[1:] and not is_of_sample:
            hint = "let the collate_fn put them there (pad_sequence(..., batch_first=True)), and "
            hint += "the model read them so (batch_first=True of nn.Transformer, nn.LSTM and so on)"
        elif is_sized:
            hint = "let the collate_fn pad what samples have to one length and torch.stack it, "
            hint += "instead of a list of samples or their concatenation (an EmbeddingBag reads "
            hint += "stacked samples without offsets, and leaves out its padding_idx)"
        else:
            continue
        raise CaptureError(
            f"{at(loading.place)}: {name_of(path)} of a batch of {size} samples has the shape "
            f"{list(leaf.shape)}: the samples are not its first dimension",
            hint=hint,
        )


def _refuse_other_optimizers(seen: Seen) -> None:
    seen.forget_dropped()
    own = seen.optimizer
    trained = {id(p) for group in own.param_groups for p in group["params"]} if own else set()
    for other, place in seen.made.values():
        if not isinstance(other, Optimizer) or other is own:
            continue
        parameters = {id(p) for group in other.param_groups for p in group["params"]}
        if parameters - trained:
            raise CaptureError(
                f"{at(place)}: a second optimizer, {type(other).__name__}",
                hint="train all parameters by one optimizer, with groups for different options "
                "(torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])); what takes "
                "turns, as a GAN does, is no pipeline",
            )


def _refuse_optimizer_within(seen: Seen) -> None:
    """Refuse an optimizer that steps another one, and may do more by itself after any step.

    Which of the two torch says to step depends on how the outer one is made.
    """
    inner, outer, place = seen.optimizer, None, seen.stepped
    for code, _, own, line in seen.frames:
        value = own.get("self")
        if value is not inner and _is_optimizer(value):
            outer, place = value, ("", 0)
        elif outer is not None and not place[0] and is_user_code(code.co_filename):
            place = code.co_filename, line
    if outer is None and (held := next(filter(_is_optimizer, _held_by(inner)), None)) is not None:
        inner, outer = held, inner
    if outer is not None:
        raise CaptureError(
            f"{at(place)}: {type(outer).__name__} steps another optimizer, {type(inner).__name__}",
            hint="let the script make and step the inner one alone: what the outer one does "
            "besides, such as averages of weights every few steps, is in no job; or write one "
            "optimizer that does both",
        )


def _is_optimizer(value: Any) -> bool:
    """Whether a value is an optimizer, or is used as one, and adds something of its own."""
    if type(value).__module__.partition(".")[0] in _ADD_NOTHING:
        return False
    is_alike = all(callable(getattr(type(value), name, None)) for name in ("step", "zero_grad"))
    return isinstance(value, Optimizer) or (is_alike and hasattr(value, "param_groups"))


def _held_by(value: Any) -> Iterator[Any]:
    for held in vars(value).values():
        yield held
        if isinstance(held, list | tuple | dict):
            yield from held.values() if isinstance(held, dict) else held


def _refuse_closure_of(seen: Seen) -> None:
    """Refuse an optimizer that computes the loss several times in a step."""
    if isinstance(seen.optimizer, torch.optim.LBFGS):
        raise CaptureError(
            f"{at(seen.stepped)}: {type(seen.optimizer).__name__}.step() computes the loss again, "
            "which no rank of a pipeline can do",
            hint="use an optimizer whose step() needs no closure, such as SGD or AdamW",
        )


def model_of(seen: Seen, recording: Recording) -> nn.Module:
    """Return the smallest module of the script that holds all modules of the step."""
    program = Program(recording.entries, recording.loss)
    called = [recording.entries[index].target for index in program.modules]
    called = list({id(module): module for module in called}.values())
    if not called:
        raise CaptureError(
            f"{at(recording.place)}: the loss depends on no module with parameters",
            hint="let a torch.nn.Module compute it",
        )
    used = {
        id(item.tensor)
        for index in program.needed
        for item in parts((recording.entries[index].args, recording.entries[index].kwargs))
        if isinstance(item, Outer) and isinstance(item.tensor, nn.Parameter)
    }
    wanted = {id(module) for module in called}
    named = _modules_of_script(seen)
    best: nn.Module | None = None
    for module in (*called, *named.values()):
        inner = list(module.modules())
        holds = wanted <= {id(m) for m in inner} and used <= {id(p) for p in module.parameters()}
        if holds and (best is None or len(inner) < len(list(best.modules()))):
            best = module
    if best is not None:
        return best
    held = {id(p) for module in called for p in module.parameters()}
    if used - held:
        raise CaptureError(
            f"{at(recording.place)}: the loss reads a parameter that is in no module of the step",
            hint="make it an attribute of the model",
        )
    names = {id(module): name for name, module in reversed(list(named.items()))}
    chosen: dict[str, nn.Module] = {}
    for module in _outermost(called):
        name = names.get(id(module), type(module).__name__.lower()).replace(".", "_")
        while name in chosen or hasattr(nn.Module, name):
            name += "_"
        chosen[name] = module
    return Modules(chosen)


def _outermost(modules: list[nn.Module]) -> Iterator[nn.Module]:
    for module in modules:
        others = (other for other in modules if other is not module)
        if not any(module is inner for other in others for inner in other.modules()):
            yield module


def _modules_of_script(seen: Seen) -> dict[str, nn.Module]:
    """Modules that are values of variables when the optimizer steps, or attributes of these."""
    found: dict[str, nn.Module] = {}
    for _, scope, own, _ in seen.frames:
        for name, value in (*own.items(), *scope.items()):
            if isinstance(value, nn.Module):
                found.setdefault(name, value)
            elif name == "self":
                for inner, part in list(getattr(value, "__dict__", {}).items()):
                    if isinstance(part, nn.Module):
                        found.setdefault(inner, part)
    return found


def _refuse_unfollowed(program: Program) -> None:
    for index in program.needed:
        entry = program.entries[index]
        if entry.name in _UNFOLLOWED:
            raise CaptureError(
                f"{at(entry.place)}: {entry.name}() takes a number out of a tensor, and the loss "
                "depends on it",
                hint="compute with the tensor itself, or with .detach() of it",
            )
        for item in parts((entry.args, entry.kwargs)):
            if isinstance(item, Outer) and item.tensor.grad_fn is not None:
                raise CaptureError(
                    f"{at(entry.place)}: {entry.name} reads a tensor with a gradient that pipectl "
                    "has not seen computed",
                    hint="compute it from the batch, by functions of torch, in the same step; let "
                    "forward return what it leaves in an attribute or gives to a hook; leave out "
                    "torch.autograd.grad and calls of autograd functions (put them into the model)",
                )


def _refuse_untrained(seen: Seen, model: nn.Module) -> None:
    assert seen.optimizer is not None
    held = {id(p) for p in model.parameters()}
    for group in seen.optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in held and parameter.requires_grad:
                if parameter.grad is None and id(parameter) not in seen.leaves:
                    continue  # of a module that this step does not use
                raise CaptureError(
                    f"{at(seen.stepped)}: the optimizer trains a tensor of shape "
                    f"{list(parameter.shape)} that is in no module of the step",
                    hint="make it a torch.nn.Parameter of the model",
                )


def _refuse_clips(seen: Seen, model: nn.Module) -> None:
    """Refuse what ``training.clip_grad_norm`` does not do."""
    stepped = {id(p) for group in seen.optimizer.param_groups for p in group["params"]}  # type: ignore[union-attr]
    trained = {id(p) for p in model.parameters() if id(p) in seen.zeros} & stepped
    clips = [each for each in seen.clips if not each.steps]
    for clip in clips:
        limits = {each.limit for each in clips}
        is_whole = trained <= {id(p) for p in clip.parameters}
        if clip.kind != "norm" or clip.norm_type != 2.0 or not is_whole or len(limits) > 1:
            raise CaptureError(
                f"{at(clip.place)}: clips single values, another norm than that of squares, or "
                "only some of the gradients",
                hint="use torch.nn.utils.clip_grad_norm_(model.parameters(), limit)",
            )
        if any(id(p) in seen.leaves and id(p) not in stepped for p in clip.parameters):
            raise CaptureError(
                f"{at(clip.place)}: the norm is also of gradients of parameters that the optimizer "
                "does not have, and no job computes these",
                hint="clip the parameters of the optimizer alone, or freeze the others by "
                "requires_grad_(False)",
            )
        if clip.backwards < len(seen.recorder.recordings):
            raise CaptureError(
                f"{at(clip.place)}: clips gradients that a later backward() of the step adds to",
                hint="clip them once, after the last backward() of a step and before step()",
            )


def _reset(seen: Seen, model: nn.Module) -> None:
    """Undo what the step has changed in the model, and keep modules in evaluation that were."""
    for buffer, before in seen.recorder.buffers.items():
        with torch.no_grad():
            buffer.data.copy_(before)
    for parameter in model.parameters():
        parameter.grad = None
    trained = {id(p) for group in seen.optimizer.param_groups for p in group["params"]}  # type: ignore[union-attr]
    for parameter in model.parameters():
        if parameter.requires_grad and id(parameter) not in trained:
            parameter.requires_grad_(False)
    for module, was_training in seen.recorder.training.items():
        if not was_training:
            _keep_in_evaluation(module)


def _keep_in_evaluation(module: nn.Module) -> None:
    module.train = lambda *_: module  # type: ignore[method-assign]
    module.training = False


__all__ = ["BATCH", "Modules", "Parts", "program_of"]
