"""The modules around code of the user's own, and what running it tells: shapes, sizes, operations.

Axes: B batch, T tokens, C embed_dim, V vocabulary, H heads.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from attnlm.model.building import stored_buffers, uninitialised_model
from attnlm.model.costs import Costs
from attnlm.model.language_model import Caches, LanguageModel
from attnlm.model.own_arguments import resolved_arguments
from attnlm.model.own_parts import build_module, on_device_of, require_shape

if TYPE_CHECKING:
    from attnlm.model.own_specs import OwnModel
    from attnlm.model.spec import ModelSpec, Shapes

_TARGETS = ("targets", "target", "labels", "y", "yb")


class OwnLanguageModel(LanguageModel):
    """A whole model of the user's, which may give its logits in any of these ways.

    Logits (B, T, V), a pair (logits, loss), an object with `.logits`, logits (B·T, V), or the last
    position only if it gets no targets, as in nanoGPT. The loss is always computed here.
    """

    def __init__(self, spec: OwnModel, vocab_size: int, module: nn.Module | None = None) -> None:
        """Build the module, or take the one that the user has built."""
        super().__init__()
        self.spec = spec
        self._code = spec.code
        self.vocab_size = vocab_size
        if module is None:
            sizes = {"vocab_size": vocab_size, "block_size": spec.block_size}
            arguments = resolved_arguments(spec.codes, spec.arguments)
            module = build_module(spec.code, sizes, arguments)
        self.module = module
        parameters = inspect.signature(module.forward).parameters
        self.targets_name = next((name for name in parameters if name in _TARGETS), None)
        """the argument of the module that takes targets; None if it takes none"""

    def forward(self, tokens_BT: Tensor, caches: Caches = None) -> Tensor:
        return self.call(tokens_BT)[0]

    def is_matrix(self, name: str, parameter: Tensor) -> bool:
        """Return True for a matrix inside: not the table of tokens or positions, or the LM head."""
        owner = self.get_submodule(name.rpartition(".")[0])
        rows = parameter.size(0) if parameter.ndim == 2 and 1 not in parameter.shape else 0
        is_table = isinstance(owner, nn.Embedding) or rows in (0, self.vocab_size)
        return not is_table and (isinstance(owner, nn.Linear) or rows != self.block_size)

    def call(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> tuple[Tensor, Any]:
        """Return logits (B, T, V), and the loss of the module itself, if it returned one."""
        # With targets, a module gives the logits of all positions, also where it otherwise gives
        # those of the last one only, as nanoGPT does.
        targets = (tokens_BT if targets_BT is None else targets_BT).contiguous()
        named_targets = {} if self.targets_name is None else {self.targets_name: targets}
        with on_device_of(tokens_BT):
            output = self.module(tokens_BT, **named_targets)
            if isinstance(output, tuple | list) and output:
                logits, loss = output[0], output[1] if len(output) > 1 else None
            else:
                logits, loss = getattr(output, "logits", output), getattr(output, "loss", None)
        batch, length = tokens_BT.shape
        if isinstance(logits, Tensor) and logits.shape == (batch * length, self.vocab_size):
            logits = logits.view(batch, length, self.vocab_size)
        return require_shape(self._code, logits, (batch, length, self.vocab_size)), loss


# --- What running the code tells ------------------------------------------------------------------


def built_shapes(spec: ModelSpec, vocab_size: int) -> Shapes:
    """Return the shape of each parameter of a model with own code."""
    named = _unwritten_model(spec, vocab_size).named_parameters()
    return {name: tuple(parameter.shape) for name, parameter in named}


def built_buffers(spec: ModelSpec, vocab_size: int) -> dict[str, Tensor]:
    """Return the buffers of a new model with own code that a checkpoint holds."""
    return stored_buffers(_unwritten_model(spec, vocab_size))


def _unwritten_model(spec: ModelSpec, vocab_size: int) -> LanguageModel:
    """Return the model with weights that were not written, and so take no memory."""
    with torch.random.fork_rng(devices=[]):
        return uninitialised_model(spec, vocab_size)


def measured_costs(spec: ModelSpec, vocab_size: int) -> Costs:
    """Return the costs of a model with own code, from one forward and backward pass of one window.

    The whole model counts as one layer.
    """
    hashes = tuple(code.sha256 for code in spec.codes.values())  # names alone are equal
    return _costs_of(spec, max(1, vocab_size), hashes)  # type: ignore[arg-type]


class _Counting(TorchDispatchMode):
    """A mode that counts operations as PyTorch's FlopCounterMode does, without the compiler."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise, PyTorch imports its compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if (count := flop_registry.get(getattr(func, "overloadpacket", None))) is not None:
            self.flops += count(*args, **kwargs, out_val=result)
        return result


@functools.cache
def _costs_of(spec: ModelSpec, vocab_size: int, hashes: tuple[str, ...]) -> Costs:
    """Return the costs of a model with the first weights of a fixed seed."""
    kept: dict[int, int] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # own code may refuse NaN, or compute less with it
        model = spec.build(vocab_size).train()
        ids_BT = torch.zeros(1, spec.block_size, dtype=torch.long)
        weights = {p.untyped_storage()._cdata for p in model.parameters()}

        def keep(tensor: Tensor) -> Tensor:
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata not in weights:
                    kept[storage._cdata] = storage.nbytes()
            return tensor

        # No formula is known for the fused attention of a CPU.
        with sdpa_kernel(SDPBackend.MATH), _Counting() as counter:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = model.loss(ids_BT, ids_BT)
            forward = counter.flops
            loss.backward()
            both = counter.flops
    tables = [m.embedding_dim for m in model.modules() if isinstance(m, nn.Embedding)]
    features = math.ceil(sum(kept.values()) / 4 / spec.block_size)
    weights_used = sum(p.numel() for n, p in model.named_parameters() if model.is_matrix(n, p))
    # Costs count two operations for each weight of a matrix, and as many for each gradient.
    counted = 2 * weights_used
    return Costs(
        layers=1,
        width=tables[0] if tables else 1,
        lm_head_inputs=0,
        multiplied_weights=weights_used,
        mixing_flops=forward // spec.block_size - counted,
        mixing_gradient_flops=(both - forward) // spec.block_size - 2 * counted,
        kept_features=features,
        cached=0,
        peak_activations=-(-features // 4),
    )
