"""What the adapter says of models that it has no rules for: ``python refused.py '{...}'`` prints a line of JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import stand
from transformers import MambaConfig

from awexd_client.adapters.vllm import VLLMAdapter
from awexd_transports.errors import InvalidArgument

_EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTIZED: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {
            "all": {
                "targets": ["Linear"],
                "weights": {**_EIGHT_BITS, "strategy": "channel", "dynamic": False},
                "input_activations": {**_EIGHT_BITS, "strategy": "token", "dynamic": True},
            }
        },
        "ignore": ["lm_head"],
    },
}


def said(folder: Path, **options: Any) -> str:
    config = stand.configure(folder, 1, load_format="dummy", **options)
    model = stand.load(config, transform=False)
    try:
        VLLMAdapter(config).engine_weights(model)
    except InvalidArgument as error:
        return str(error)
    return "not refused"


def main() -> None:
    task = json.loads(sys.argv[1])
    stand.join(0, 1, Path(task["store"]))
    llama, mamba = Path(task["models"]) / "llama" / "new", Path(task["store"] + "-mamba")
    MambaConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=1, state_size=16, architectures=["MambaForCausalLM"]
    ).save_pretrained(mamba)
    report = {name: said(llama, hf_overrides={"quantization_config": each}) for name, each in QUANTIZED.items()}
    sys.stdout.write("\n" + json.dumps({**report, "mamba": said(mamba)}) + "\n")


if __name__ == "__main__":
    main()
