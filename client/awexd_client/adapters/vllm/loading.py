"""Loading by vLLM's own loader, once the bytes are there, so that a failure leaves the engine alive.

vLLM loads checkpoint tensors into a running model in a session (vllm/model_executor/model_loader/reload/layerwise.py):
parameters move to the meta device, loaders are wrapped, each module is processed once all of it has come, and what
comes out is copied into the memory that it had. A session here is over the modules that are loaded only; those that are
written in place are not part of it. An exception in its midst would leave parameters on the meta device, and the
engine's next step would end it: here the session is rolled back first.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from awexd_client.adapters.buffers import HostBuffers
from awexd_client.adapters.vllm.layout import class_names
from awexd_transports.errors import AwexdError, InvalidArgument

if TYPE_CHECKING:
    import torch

_PREPACKED_ONCE = "CPUUnquantizedExperts"
"""Experts whose kernel packs its weights only when it is made (fused_moe/experts/cpu_moe.py, 0.32): a reload must make
another, or it copies plain weights over packed ones."""
_STACK = re.compile(r"(.+\.mlp\.experts)\.((gate_up|down)_proj(_bias)?)")
"""gpt-oss's tensors of all experts of a layer."""


class Loading:
    """What is done once an update's bytes are in.

    Args:
        model: the live model.
        modules: those to be loaded by the model: path, module, and how many elements are to come into it.
        held: checkpoint tensors, in the model's order (a fused module's side by side); filled by then, and cleared
            once they are loaded.
        config: vLLM's VllmConfig, which the loaders of some layers look at.
    """

    def __init__(
        self,
        model: Any,
        modules: Sequence[tuple[str, Any, int]],
        held: HostBuffers,
        config: Any,
    ) -> None:
        if modules and getattr(model, "_do_torchao_reload", False):
            raise InvalidArgument("a model quantized by torchao is not loaded into while it runs")
        self._model = model
        self._modules = modules
        self._held = held
        self._config = config
        self._refresh = list(_refreshers(model, {id(module) for _, module, _ in modules}, config.model_config.dtype))

    @property
    def needed(self) -> bool:
        return bool(self._modules or self._refresh)

    def run(self) -> None:
        """Loads, then computes anew what is derived from weights. In the worker's thread; the model is not running.

        Raises:
            AwexdError: the loader took other elements than it was given.
            Exception: whatever vLLM's loader raises; the model can run then, on weights that are a mix.
        """
        import torch
        from vllm.config import set_current_vllm_config

        device = next((tensor.device for tensor in self._model.parameters()), torch.device("cpu"))
        with set_current_vllm_config(self._config), torch.no_grad(), torch.device(device):
            if self._modules:
                with _session(self._modules, self._config.model_config):
                    self._model.load_weights(self._tensors())
                self._held.clear()
            for refresh in self._refresh:
                refresh()

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Checkpoint tensors as the model's loader takes them in a session.

        gpt-oss's experts one by one: of a whole stack vLLM copies into the parameters themselves
        (``_load_weights_other``, models/gpt_oss.py), past the loaders that a session has wrapped.
        """
        stacked = any("GptOssRoutedExperts" in class_names(module) for _, module, _ in self._modules)
        for name, tensor in self._held.tensors.items():
            found = _STACK.fullmatch(name) if stacked else None
            if found is None:
                yield name, tensor
                continue
            for expert, each in enumerate(tensor):
                yield f"{found[1]}.{expert}.{found[2]}", each


def _refreshers(model: Any, loaded: set[int], dtype: torch.dtype) -> Iterator[Callable[[], None]]:
    """Calls that compute derived weights from those that they are derived from."""
    for module in model.modules():
        kinds = class_names(module)
        if "VocabParallelEmbedding" in kinds and hasattr(module, "cpu_linear") and id(module) not in loaded:
            # On CPUs a head has a packed copy beside its weight, a tied one of the embedding's, which vLLM's own reload
            # leaves as it was (0.32).
            yield _bound(module.quant_method.process_weights_after_loading, module)
        if "OAIAttention" in kinds:
            yield _bound(module.attn.impl.process_weights_after_loading, dtype)  # FlashInfer's copy of sinks, in fp32
        if "MLAAttention" in kinds:
            yield _bound(module.process_weights_after_loading, dtype)  # W_UV and W_UK_T, of kv_b_proj


def _bound(call: Callable[[Any], Any], argument: Any) -> Callable[[], None]:
    def run() -> None:
        call(argument)

    return run


@contextlib.contextmanager
def _session(modules: Sequence[tuple[str, Any, int]], config: Any) -> Iterator[None]:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    kernels = [(module.quant_method, module.quant_method.moe_kernel) for _, module, _ in modules if _packs_once(module)]
    try:
        for method, _ in kernels:
            method.moe_kernel = None
        for _, module, _ in modules:
            initialize_layerwise_reload(module)
        yield
        for path, module, expected in modules:
            _check_complete(path, module, expected)
        for _, module, _ in modules:
            finalize_layerwise_reload(module, config)
    except BaseException:
        for _, module, _ in modules:
            _roll_back(module)
            finalize_layerwise_reload(module, config)
        for method, kernel in kernels:
            method.moe_kernel = kernel
        raise


def _packs_once(module: Any) -> bool:
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    return _PREPACKED_ONCE in class_names(getattr(kernel, "fused_experts", None))


def _check_complete(path: str, module: Any, expected: int) -> None:
    """A module of which a part only was loaded would be processed with what its memory happened to hold."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    info = get_layerwise_info(module)
    if info.can_load() and info.load_numel != expected:
        raise AwexdError(f"{path}: vLLM's loader took {info.load_numel} elements of {expected}")


def _roll_back(module: Any) -> None:
    """Forgets what was loaded in half, so that finalizing puts the former tensors back."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    info = get_layerwise_info(module)
    if info.can_load():
        info.loaded_weights.clear()
        info.load_numel = 0
