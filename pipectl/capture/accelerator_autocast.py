"""The autocast of an accelerator, for models that are captured on the CPU.

Each kind of device has lists of its own: of bfloat16 values, ``layer_norm``, ``softmax`` and
``sum`` give bfloat16 on CPUs and float32 on GPUs. A model may read the type of such a value while
it is captured (``mask.to(x.dtype)``, ``torch.finfo(x.dtype).min``, an ``if``), and the graph keeps
what it has read. So a model for an accelerator is captured while the CPU's autocast casts what that
of the accelerator does.

Torch tells for which operators an accelerator's autocast has a kernel, but not what it does. That
is in the lists of ``ATen/autocast_mode.h``, from which all kinds of accelerators take it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipectl.torch_api import autocast_kernels, replaced_autocast

_WIDE = frozenset(
    """
    acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity
    cross_entropy_loss cumprod cumsum dist erfinv exp expm1 frobenius_norm group_norm
    hinge_embedding_loss huber_loss kl_div l1_loss layer_norm linalg_matrix_norm linalg_vector_norm
    log log10 log1p log2 log_softmax logsumexp margin_ranking_loss mse_loss multi_margin_loss
    multilabel_margin_loss native_layer_norm nll_loss nll_loss2d norm nuclear_norm pdist
    poisson_nll_loss pow prod reciprocal renorm rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss
    softmax softplus sum tan triplet_margin_loss _upsample_bicubic2d_aa _upsample_bilinear2d_aa
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_bicubic2d
    upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_trilinear3d
    """.split()  # noqa: SIM905
)
"""Operators that autocasts run in float32, without the names of their overloads."""
_NARROW = frozenset(
    """
    _convolution _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell
    addmv addr chain_matmul convolution einsum gru_cell linalg_multi_dot lstm_cell mv rnn_relu_cell
    rnn_tanh_cell
    """.split()  # noqa: SIM905
)
"""Operators that autocasts run in half precision, and that of the CPU leaves alone."""


@contextmanager
def autocast_of(kind: str) -> Iterator[None]:
    """Let ``torch.autocast("cpu")`` cast what the autocast of a kind of accelerator casts.

    Args:
        kind: type of the accelerator in torch; nothing changes for ``cpu``.
    """
    if kind == "cpu":
        yield
        return
    there, here = autocast_kernels(kind), autocast_kernels("cpu")
    rules = dict.fromkeys(here - there, "none")
    for name in there - here:
        operator = name.partition(".")[0]
        if operator in _WIDE or operator in _NARROW:  # others take the widest type, as ever
            rules[name] = "wide" if operator in _WIDE else "narrow"
    with replaced_autocast(rules):
        yield
