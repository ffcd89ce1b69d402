# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights in the shapes of known ones, and a tokenizer; nothing is fetched.

Weights are drawn wide, so that the best logit stands clear of the second and greedy tokens can be
compared between programs that round differently.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 512
LAYERS = 2

#: Axes that all of them share.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
#: Multi-head latent attention; every layer is dense, since first_k_dense_replace counts them all.
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": LAYERS,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
}
#: By name: the model type of transformers, its architecture, and what differs.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 128}),
    "llama": ("llama", "LlamaForCausalLM", {"num_key_value_heads": 4, "head_dim": 128}),
    "deepseek-v2": ("deepseek_v2", "DeepseekV2ForCausalLM", _LATENT),
    "deepseek-v3.2": (
        "deepseek_v32",
        "DeepseekV32ForCausalLM",
        _LATENT | {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048},
    ),
}


def tokenizer(folder: Path) -> None:
    """One token for each of the words t0, t1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="t0", eos_token="t1", unk_token="t2"
    )
    fast.save_pretrained(folder)


def build(name: str, folder: Path, dtype: str, seed: int = 0) -> Path:
    """Write a model into a folder of its own, unless it is there; return that folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    place = folder / f"{name}-{dtype}"
    if (place / "tokenizer.json").exists():
        return place
    kind, architecture, own = MODELS[name]
    config = AutoConfig.for_model(kind, architectures=[architecture], dtype=dtype, **_COMMON | own)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    if dtype == "bfloat16":  # logits whose spacing in that type is less than what counts as a tie
        model.lm_head.weight.data.mul_(0.4)
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(place)
    saved = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(saved, indent=1))
    tokenizer(place)
    return place
