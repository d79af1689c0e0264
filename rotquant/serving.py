"""transformers runs exported models of rotquant: importing this module teaches it the quantization method `rotquant`.

After `import rotquant.serving`, `AutoModelForCausalLM.from_pretrained(folder)` gives a model with the recipe's online
transforms, quantizers of inputs and KV cache, and prefix: the simulation, whose logits equal those of `rotquant.api`.
Pipelines and lm_eval's `hf` work on it. Without this module transformers finds no weights in such a folder.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from rotquant.formats.compressed import PARTS, unpacked_weight
from rotquant.formats.export import METHOD, STEM
from rotquant.formats.reading import Packed, check_export, declared, exported_manifest, packed_of, state_files
from rotquant.models.architectures import architecture_of
from rotquant.models.integrity import checking_digests
from rotquant.weights.build import quantized_forward
from rotquant.weights.storage import take_state

#: What sentences about a folder's configuration name, of which a quantizer knows no more.
WHERE = "the model"

__all__ = ["RotquantConfig", "RotquantQuantizer"]


@register_quantization_config(METHOD)
class RotquantConfig(QuantizationConfigMixin):
    """The quantization_config of an exported folder, as it is."""

    def __init__(self, **content: Any) -> None:
        self.__dict__.update(content, quant_method=METHOD)


@register_quantizer(METHOD)
class RotquantQuantizer(HfQuantizer):
    """Unpacks weights while transformers loads them, then installs what acts at run time."""

    def __init__(self, quantization_config: RotquantConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        content = quantization_config.to_dict()
        self._packed, self._manifest = packed_of(declared(content, WHERE), WHERE), exported_manifest(content)
        self._files: list[Path] = []

    def update_tp_plan(self, config: Any) -> Any:
        """Name the weights' file, the one thing that is done here: this is called before transformers looks for it."""
        config.transformers_weights = self.quantization_config.to_dict().get("weights_file", f"{STEM}.safetensors")
        return config

    def get_weight_conversions(self) -> list[WeightConverter]:
        """Packed weights become floating-point ones."""
        sources = [f"{part}$" for part in PARTS if self._packed.has(part)]
        return [WeightConverter(sources, "weight", operations=[_Unpack(self._packed)])]

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        self._files = [Path(file) for file in kwargs.get("checkpoint_files") or ()]
        ignored = set(model._keys_to_ignore_on_load_unexpected or ())
        model._keys_to_ignore_on_load_unexpected = ignored | {r"^rotquant\."}

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        digests = check_export(self._files[0].parent, partial=True)
        with checking_digests(self._files if digests else (), digests):
            tensors = state_files(self._files)
        state = take_state(self._files[0].parent, self._manifest, architecture_of(model), tensors)
        model.rotquant = quantized_forward(model, state.recipe, state)

    def is_serializable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Whether a loaded model can be saved: its weights are no integers any more, so it cannot."""
        return False

    @property
    def is_trainable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Whether transformers may train the model."""
        return False


class _Unpack(ConversionOps):
    """A weight of its packed parts, in the model's type."""

    def __init__(self, packed: Packed) -> None:
        self._packed = packed

    def convert(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """Called by transformers with the tensors of one weight by their patterns."""
        parts = {
            name.removesuffix("$"): found[0] if isinstance(found, list) else found for name, found in input_dict.items()
        }
        dtype = getattr(kwargs.get("config"), "dtype", None) or torch.float32
        if "weight_scale" not in parts:  # one that is not quantized
            return {target_patterns[0]: parts["weight"]}
        return {target_patterns[0]: unpacked_weight(parts, self._packed.scheme, dtype)}
