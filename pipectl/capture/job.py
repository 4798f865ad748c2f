"""The objects that a spec names, and their captured graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipectl.capture import factories
from pipectl.capture.accelerator_autocast import autocast_of
from pipectl.capture.batch import Reader, check_samples
from pipectl.capture.build import (
    build_model,
    evaluation_loader,
    parts_of_script,
    training_loader,
)
from pipectl.capture.data import Loader
from pipectl.capture.deferred import Deferred
from pipectl.capture.draws import WatchedDraws
from pipectl.capture.export import export_model
from pipectl.capture.fallback import Fallback, KeptModules, Notify
from pipectl.capture.graph import CapturedGraph
from pipectl.capture.groups import assign_groups
from pipectl.capture.half_weights import half_weights
from pipectl.capture.leaves import without_objects
from pipectl.capture.model_with_loss import ModelWithLoss, own_name
from pipectl.capture.modes import set_mode
from pipectl.capture.norms import refuse_single_values
from pipectl.capture.opaque import Opaque
from pipectl.capture.operators import (
    FunctionCall,
    calling_module,
    custom_operators,
    mark_draws,
    runs,
)
from pipectl.capture.python_state import own_generators, preserve_state
from pipectl.capture.randomness import SHARED_GENERATORS, states_of
from pipectl.capture.refusals import (
    Refusal,
    RefusedError,
    misfit,
    place_of,
    place_of_node,
    refuse_overlaps,
    refuse_parameter_hooks,
    refuse_parts,
    refuse_unsaved,
)
from pipectl.capture.regions import accelerator, arithmetic
from pipectl.capture.single import refuse_other_branch
from pipectl.capture.tensors import is_deferred
from pipectl.capture.weights import Weights
from pipectl.capture.writes import refuse_aliases, refuse_reads, refuse_sparse, refuse_writes
from pipectl.errors import CaptureError
from pipectl.faults import fault_of, is_ours
from pipectl.objects import seed_everything
from pipectl.script import Parts
from pipectl.spec import JobSpec
from pipectl.spec.code_sections import Factory
from pipectl.torch_api import pytree, uncompiled

_TOO_SMALL = Refusal.SINGLE_VALUE, Refusal.ONE_SAMPLE
_CPU = torch.device("cpu")
SMALLEST_EXPORT = 2
"""torch.export gives batch sizes 0 and 1 a meaning of their own."""


class CapturedJob:
    """Model, loss and data of a job, and the graphs of their training and evaluation.

    Args:
        notify: called with a message if a capture takes long.
        script: what the job's script has made, if it has run in this process.

    Attributes:
        wrapper: of the user's model and loss.
        loader: of the training data.
        states: parameters and buffers by full name within the wrapper, tied ones once. With
            ``materialize: per_rank`` they have no memory until :meth:`materialize` is called.
        sizes: of ``states``, also of those that were released.
        tied: further names of tied states to the name in ``states``.

    Raises:
        CaptureError: a factory fails or returns the wrong kind of object, or a trained parameter
            has a hook on its gradient or shares memory with another state.
        DataFileError: the initial weights do not fit the model.
    """

    def __init__(
        self, spec: JobSpec, notify: Notify = lambda _: None, *, script: Parts | None = None
    ) -> None:
        self.spec = spec
        path, per_rank = spec.model.weights, spec.model.materialize == "per_rank"
        self._weights = None if path is None else Weights(Path(path))
        self._deferred = Deferred(spec.training.seed) if per_rank else None
        self.script = parts_of_script(spec) if script is None else script
        model, loss = self._model(), self._loss()
        call = self.script.program.forward if self.script and spec.model.is_of_script else None
        self.wrapper = ModelWithLoss(model, loss, with_outputs=False, call=call)
        refuse_parts(self.wrapper, spec.model.factory)
        refuse_parameter_hooks(self.wrapper.named_parameters())
        self.loader = training_loader(spec, self.script)
        self.states: dict[str, Tensor] = {
            **dict(self.wrapper.named_parameters()),
            **dict(self.wrapper.named_buffers()),
        }
        self.sizes = {name: tensor.shape for name, tensor in self.states.items()}
        refuse_unsaved(self.states)
        refuse_overlaps(self.states)
        self._names = {id(tensor): name for name, tensor in self.states.items()}
        self.tied: dict[str, str] = {}
        for named in (self.wrapper.named_parameters, self.wrapper.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                if self._names[id(tensor)] != name:
                    self.tied[name] = self._names[id(tensor)]
        if self._weights is not None:
            self._weights.match(self.wrapper, self.states, self.tied)
            for name, tensor in self.states.items():
                loaded = None if is_deferred(tensor) else self._weights.load(name, tensor)
                if loaded is not None:
                    with torch.no_grad():
                        tensor.copy_(loaded)
        self._fallback = Fallback(self.wrapper, spec.model.opaque, self._values, notify)
        self._released: dict[str, tuple[Sequence[int], Sequence[int]]] = {}
        self._graphs: dict[tuple[bool, int, int], CapturedGraph] = {}
        self._compared: set[tuple[bool, int, int]] = set()
        self._read: dict[str, RefusedError] = {}
        """See :class:`KeptModules`."""

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self.wrapper.model

    @property
    def is_deferred(self) -> bool:
        """Whether parameters or buffers of the model have no memory: it may fit no process."""
        return any(map(is_deferred, (*self.wrapper.parameters(), *self.wrapper.buffers())))

    def _model(self) -> nn.Module:
        if self.script is not None and self.spec.model.is_of_script:
            return self.script.model
        return build_model(self.spec, self._deferred)

    def _loss(self) -> Any:
        if self.script is not None and self.spec.loss.is_of_script:
            return self.script.loss(adds_up=self.spec.loss.adds_up)
        return None if self.spec.loss.factory == "model" else self._bound(self.spec.loss, "loss")

    def materialize(self, names: Iterable[str]) -> None:
        """Give values to those of ``states`` that have none; see :meth:`initial_values`.

        Those that were released get memory again, and any values.
        """
        for name in names:
            state = self.states[name]
            if is_deferred(state):
                self.states[name] = self.initial_values(name)
            elif name in self._released:
                sizes, strides = self._released.pop(name)
                if not state.numel():  # else somebody has given it values
                    empty = torch.empty_strided(sizes, strides, dtype=state.dtype, device="cpu")
                    state.data = empty

    def release(self, names: Iterable[str]) -> None:
        """Free the memory of some of ``states``, which :meth:`materialize` brings back."""
        for name in names:
            state = self.states[name]
            state.grad = None
            if not is_deferred(state) and name not in self._released:
                self._released[name] = state.size(), state.stride()
                state.data = state.data.new_empty(0)

    def initial_values(self, name: str) -> Tensor:
        """Return the values of one of ``states`` that has none yet; they belong to the caller.

        Raises:
            CaptureError: neither the checkpoint nor the factory gives it values.
        """
        tensor = self.states[name]
        loaded = None if self._weights is None else self._weights.load(name, tensor)
        if loaded is None:
            assert self._deferred is not None
            return self._deferred.make(tensor, own_name(name))
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(loaded, tensor.requires_grad) if is_parameter else loaded

    @contextmanager
    def arithmetic(self, device: torch.device = _CPU) -> Iterator[None]:
        """Let ``wrapper`` compute in the precision of the job, on a device.

        On the CPU, a job for accelerators computes in the types that these would give.
        """
        precision, is_elsewhere = self.spec.training.precision, device.type != "cpu"
        kind = accelerator()[0] if self.spec.resources.gpus_per_node else "cpu"
        halves = half_weights(self.wrapper, precision, self._deferred)
        casts = autocast_of("cpu" if is_elsewhere else kind)
        with casts, arithmetic(precision, device), halves:
            yield

    @property
    def kept(self) -> dict[str, str]:
        """Why submodules became single operators, by their paths in the user's model."""
        return self._fallback.reasons

    def training_graph(self, samples: int, length: int = 0) -> CapturedGraph:
        """Return the training graph for micro-batches of ``samples``.

        Args:
            length: of their sequences; 0 stands for the largest of the training data.

        Raises:
            CaptureError: the model cannot be captured, or no gradient reaches any parameter.
        """
        graph = self._graph(self.loader, samples, length, training=True)
        if not graph.requires_grad[graph.loss]:
            raise CaptureError(
                "loss: depends on no parameter that requires a gradient",
                hint="check that the model is trained, not frozen or detached",
            )
        return graph

    def evaluation_graph(self, samples: int, length: int = 0) -> CapturedGraph:
        """Return the evaluation graph (``model.eval()``), with outputs if a metric needs them.

        It is captured on a training batch; with buckets on a held-out one, whose lengths may
        differ.
        """
        held_out = self.evaluation_loader if self.spec.data.buckets else None
        with _in_evaluation():
            return self._graph(held_out or self.loader, samples, length, training=False)

    @cached_property
    def evaluation_loader(self) -> Loader | None:
        """The held-out data, or None."""
        return evaluation_loader(self.spec, self.script)

    def evaluate(self, batch: tuple[Any, Any], device: torch.device) -> tuple[Tensor, Any]:
        """Return the loss and the outputs of the user's own model, which stays as it is.

        Args:
            batch: inputs and targets, anywhere.
            device: of the parameters, which have values.

        Raises:
            CaptureError: the model or the loss raises.
        """
        inputs, targets = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)
        was_training, with_outputs = self.wrapper.training, self.wrapper.with_outputs
        set_mode(self.wrapper, training=False)
        self.wrapper.with_outputs = True
        try:
            with (
                _in_evaluation(),
                torch.no_grad(),
                torch.random.fork_rng(devices=[]),
                preserve_state(self.wrapper, self.wrapper.buffers()),
                self.arithmetic(device),
            ):
                loss, outputs = self.wrapper(inputs, targets)
        except CaptureError:
            raise
        except Exception as error:
            with _in_evaluation():
                raise misfit(error, inputs, targets, self.spec) from error
        finally:
            self.wrapper.with_outputs = with_outputs
            set_mode(self.wrapper, training=was_training)
        return loss, outputs

    def check_counts(self) -> None:
        """Raise if the data fill no batch, or if an evaluation would not end.

        Raises:
            CaptureError: naming the data.
        """
        if not self.loader.epoch(0):
            size = self.spec.training.batch_size
            raise CaptureError(
                f"data: {self.loader.samples} samples fill no batch of {size}",
                hint="make the batch smaller, or set data.drop_last: false",
            )
        if self.evaluation_loader is not None and self.evaluation_loader.samples is None:
            raise CaptureError(
                "evaluation.data: is iterable, so that its end is not known",
                hint="use a dataset with __len__ and __getitem__ for evaluation",
            )

    def check_shapes(self, samples: int) -> None:
        """Raise if batches from elsewhere in the data have other shapes than the first one.

        They may be padded to their longest sample, for example. Training refuses such a batch too,
        but only when it comes.

        Raises:
            CaptureError: naming the tensor and both shapes; or the model computes something else
                for sequences of another length.
        """
        known = self.loader.samples or 0
        for count, length in self.loader.shapes(samples):
            reader = Reader(self.training_graph(count, length), length=length)
            if reader.has_fixed:
                values = reader.read(self.loader.example(count, length=length))
                reader.check(values, count, values)
        if not self.loader.takes_whole and not self.spec.data.buckets:
            return  # samples of several shapes make no batch at all
        for length in self.loader.lengths:
            reader = Reader(self.training_graph(samples, length), length=length)
            for first in (known // 3, 2 * known // 3):
                if first >= samples:
                    values = reader.read(self.loader.example(samples, first, length))
                    reader.check(values, samples, values)

    def check_epoch(self, size: int | None, least: int) -> None:
        """Raise if the model refuses a micro-batch of an epoch, of which the last may be small.

        Args:
            size: samples of a full one; None if it is open. Then only batches count that have fewer
                samples than every micro-batch needs.
            least: samples that it needs; see :meth:`smallest`.

        Raises:
            CaptureError: the first refusal.
        """
        for samples, length in self.loader.shapes(size):
            if size is None and samples >= least:
                continue
            if (refusal := self.refusal(samples, length)) is not None:
                raise refusal

    def refusal(self, samples: int, length: int = 0) -> CaptureError | None:
        """Return why the model trains on no micro-batches of ``samples``; None if it does.

        Code of the user that runs as an operator may refuse them, too, so the model runs once.

        Args:
            length: of their sequences; 0 stands for the largest of the training data.
        """
        try:
            graph = self.training_graph(samples, length)
        except CaptureError as error:
            return error
        kinds = Opaque, FunctionCall
        if any(runs(node, graph.root, kind) for node in graph.operators for kind in kinds):
            return self.misfit(samples, length)
        return None

    def smallest(self, size: int) -> tuple[int, str]:
        """Return the least samples of a micro-batch that the model takes, and why no fewer.

        Torch's norms may refuse fewer, and models that compute something else for one sample are
        refused it.

        Unknown, and taken as 1, for a graph that is valid for one size only, if the job sets it.

        Args:
            size: of the usual micro-batch.
        """
        least, reason = 1, ""
        graph = self.training_graph(max(size, SMALLEST_EXPORT))
        if graph.fixed and self.spec.pipeline.micro_batches is not None:
            return least, reason
        while least <= self.spec.training.batch_size:
            refusals = (self.refusal(least, length) for length in self.loader.lengths)
            refused = (each for each in refusals if isinstance(each, RefusedError))
            single = next((e for e in refused if e.refusal in _TOO_SMALL), None)
            if single is None:
                break
            least, reason = least + 1, single.message
        return least, reason

    def misfit(self, samples: int, length: int = 0) -> CaptureError | None:
        """Return why model and loss fail on the first ``samples`` samples; None if they do not.

        Args:
            length: of their sequences; 0 stands for the largest of the training data.
        """
        set_mode(self.wrapper, training=True)
        return self._run(self.loader.example(samples, length=length))

    def _run(self, batch: tuple[Any, Any]) -> CaptureError | None:
        """Run the user's own model and loss once, if it is not deferred; return why they fail."""
        if self.is_deferred:
            return None
        gradients = torch.set_grad_enabled(self.wrapper.training)
        with gradients, preserve_state(self.wrapper, self.wrapper.buffers()):
            try:
                self.wrapper(*batch)
            except CaptureError as error:
                return error
            except Exception as error:
                return misfit(error, *batch, self.spec)
        return None

    def _mark_draws(self, graph: CapturedGraph, batch: tuple[Any, Any]) -> None:
        """Note which custom operators draw random numbers, by a run of the model; those may that it
        does not reach, as in a branch, and all of them if it fails. The same for their backwards.

        Raises:
            RefusedError: one draws from a generator that is not torch's own.
        """
        operators = custom_operators(graph.root)
        if self.is_deferred or not operators:
            return
        watched = WatchedDraws(own_generators(self.wrapper))
        with preserve_state(self.wrapper, self.wrapper.buffers()), suppress(Exception):
            seed_everything(0)
            with torch.set_grad_enabled(self.wrapper.training), uncompiled(), watched:
                result = self.wrapper(*pytree.tree_map_only(Tensor, Tensor.clone, batch))
            counts = Counter[Any](node.target for node in operators)
            missed = {each for each in counts if watched.calls[each] < counts[each]}
            mark_draws(operators, watched.shared | missed)
            if self.wrapper.training and not any(
                runs(node, graph.root, Opaque) for node in graph.operators
            ):  # which may not have its own parameters in this run
                before = states_of(SHARED_GENERATORS)
                trained = [each for each in self.wrapper.parameters() if each.requires_grad]
                torch.autograd.grad(result, trained, allow_unused=True)
                is_drawn = states_of(SHARED_GENERATORS) != before
                mark_draws(operators, counts if is_drawn else missed, backward=True)
        for node in operators:
            if node.target in watched.own:
                raise Refusal.DRAW.error(place_of_node(node), part=calling_module(node))

    def metrics(self) -> dict[str, Any]:
        """Return metric functions or objects by name."""
        evaluation = self.spec.evaluation
        if evaluation is None:
            return {}
        return {
            name: self._bound(item, f"evaluation.metrics.{name}")
            for name, item in evaluation.metrics.items()
        }

    def weight(self) -> Any | None:
        """Return the function that weighs a micro-batch by its targets; None without one."""
        weigher = self.spec.loss.weigher
        return None if weigher is None else factories.find(weigher)

    def parameter_groups(self) -> dict[str, int]:
        """Return the index in ``optimizer.groups`` of each parameter that belongs to a group.

        Raises:
            CaptureError: a group matches no parameter.
        """
        names = {name: [own_name(name)] for name, _ in self.wrapper.named_parameters()}
        for further, name in self.tied.items():
            names.get(name, []).append(own_name(further))
        return assign_groups(names, [group.match for group in self.spec.optimizer.groups])

    def _values(self, tensor: Tensor) -> Tensor:
        """Return a parameter or buffer of the wrapper with values, which belong to the caller if
        made now.
        """
        if not is_deferred(tensor):
            return tensor
        name = self._names[id(tensor)]
        return (
            self.initial_values(name)
            if is_deferred(self.states[name])
            else self.states[name].to(tensor.dtype, copy=True)
        )

    def _bound(self, item: Factory, key: str) -> Any:
        return factories.bind(
            factories.find(item.factory), f"{key}.factory: {item.factory}", item.kwargs
        )

    def _graph(self, loader: Loader, samples: int, length: int, *, training: bool) -> CapturedGraph:
        key = training, samples, length or loader.lengths[-1]
        if key not in self._graphs:
            captured = [graph for (kind, *_), graph in self._graphs.items() if kind is training]
            shortest = loader.lengths[0]
            if not captured and key[2] != shortest:
                # A slice of a table that has the largest length would be left out for that one.
                captured = [self._graph(loader, samples, shortest, training=training)]
            same = next((graph for graph in captured if graph.holds_for(*key[1:])), None)
            self._graphs[key] = same or self._capture(loader, *key, next(iter(captured), None))
        refuse_single_values(self._graphs[key], *key[1:])
        if samples == 1 and key not in self._compared:
            self._compare_one(loader, length, training=training)
            self._compared.add(key)
        return self._graphs[key]

    def _compare_one(self, loader: Loader, length: int, *, training: bool) -> None:
        """Refuse a graph for any size if the model computes something else for one sample."""
        graph = self._graphs[training, 1, length or loader.lengths[-1]]
        if graph.fixed or self.kept:  # kept submodules run for each size as they are
            return
        set_mode(self.wrapper, training=training)
        try:
            with self.arithmetic(), torch.set_grad_enabled(training):
                refuse_other_branch(self.wrapper, partial(loader.example, length=length))
        except RefusedError as error:
            if not training:
                error.hint = "choose evaluation.batch_size so that no held-out sample is left alone"
            raise

    def _capture(
        self,
        loader: Loader,
        training: bool,
        samples: int,
        length: int,
        known: CapturedGraph | None,
    ) -> CapturedGraph:
        again = known is not None and known.length == length
        size = samples if again else max(samples, SMALLEST_EXPORT)
        example = partial(loader.example, length=length)
        own = example(size)
        check_samples(*own, size)
        inputs, targets = without_objects(own)
        self.wrapper.with_outputs = not training and bool(self.metrics())
        set_mode(self.wrapper, training=training)
        padded = self.spec.data.pad

        def capture(kept: KeptModules) -> CapturedGraph:
            self._read.update(kept.read)
            program, beside = export_model(self.wrapper, inputs, targets, kept, padded)
            states = self.states, self.tied
            graph = CapturedGraph(program, *states, (inputs, targets), beside, size, length, padded)
            self._mark_draws(graph, own)
            return graph

        gradients = torch.set_grad_enabled(training)
        with torch.random.fork_rng(devices=[]), self.arithmetic(), gradients:
            try:
                graph = self._fallback.capture(size, lambda n: without_objects(example(n)), capture)
            except RefusedError as error:
                if error.refusal is not Refusal.OTHER:
                    raise
                # Whose fault it is: of the job, of what torch exports, or of pipectl.
                cause = error.__cause__ or error
                refusal = self._run(own)
                if refusal is None and not (place_of(cause) and not is_ours(cause)):
                    raise fault_of(cause) from error.__cause__
                raise (refusal or error) from error.__cause__
        graphs = [graph, *self._graphs.values()]
        refuse_aliases(graph, self.states, {n for each in graphs for n in each.written_buffers})
        refuse_reads({self.tied.get(name, name): e for name, e in self._read.items()}, graphs)
        refuse_writes(graph, training=training)
        if training:
            refuse_sparse(graph)
        if graph.fixed and size != samples:
            return self._capture(loader, training, samples, length, graph)
        if known is None or list(known.signatures) == list(graph.signatures):
            return graph
        if known.length == length:
            hint = "choose micro_batches so that they divide the batch, and drop_last: true"
            if not training:
                hint = "let evaluation.data have a number of samples that is a multiple of "
                hint += f"{known.samples}"
            raise CaptureError(
                f"model: its graph for {samples} samples differs from that for {known.samples}",
                hint=hint,
            )
        pairs = zip_longest(known.signatures, graph.signatures, fillvalue="nothing")
        one, other = next(pair for pair in pairs if pair[0] != pair[1])
        raise CaptureError(
            f"model: its graph for sequences of {length} (data.buckets) differs from that for "
            f"{known.length}: {other!r} in the place of {one!r}",
            hint="let the model compute the same for every length: with sizes from the shapes of "
            "its inputs, and without an if on them",
        )


@contextmanager
def _in_evaluation() -> Iterator[None]:
    """Let refusals say in which mode the model is; those of training come before."""
    try:
        yield
    except CaptureError as error:
        if error.message.startswith(("model", "loss")):
            error.message += ", in evaluation (model.eval())"
            advice = "it works in training: look for what depends on self.training"
            error.hint = advice if error.hint is None else f"{advice}; or {error.hint}"
        raise
