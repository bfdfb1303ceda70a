"""Small models of the real families, from the library's own classes."""

import torch
from torch import nn

FAMILIES = ("olmoe", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
VOCABULARY = 96


def make_model(
    family: str,
    *,
    experts: int = 8,
    layers: int = 2,
    top_k: int = 2,
    seed: int = 0,
    width: int = 32,
    tied: bool = False,
) -> nn.Module:
    """A causal language model with ``layers`` MoE layers of ``experts`` experts, weights from ``seed``,
    and a ``width`` of tokens and inside an expert; ``tied``: the output layer is the embedding."""
    import transformers as hf

    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "attn_implementation": "eager",
        "tie_word_embeddings": tied,
    }
    if family == "olmoe":
        config = hf.OlmoeConfig(**common, intermediate_size=width, num_experts=experts, num_experts_per_tok=top_k)
    elif family == "qwen3_moe":
        config = hf.Qwen3MoeConfig(
            **common,
            intermediate_size=width,
            moe_intermediate_size=width,
            num_experts=experts,
            num_experts_per_tok=top_k,
            head_dim=8,
            norm_topk_prob=True,
        )
    elif family == "mixtral":
        config = hf.MixtralConfig(
            **common, intermediate_size=width, num_local_experts=experts, num_experts_per_tok=top_k
        )
    elif family == "deepseek_v3":
        # Layer 0 is dense, as in the original; the router limits itself to 2 of 4 groups.
        config = hf.DeepseekV3Config(
            **{**common, "num_hidden_layers": layers + 1, "num_key_value_heads": 4},
            intermediate_size=width,
            moe_intermediate_size=width,
            n_routed_experts=experts,
            num_experts_per_tok=top_k,
            n_shared_experts=1,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        )
    elif family == "gpt_oss":
        config = hf.GptOssConfig(
            **common,
            intermediate_size=width,
            num_local_experts=experts,
            num_experts_per_tok=top_k,
            head_dim=8,
            sliding_window=16,
        )
    else:
        raise ValueError(family)
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        # Fresh models start with zero biases and routers that barely prefer anything: make everything count.
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "gate.weight" in name or "router.weight" in name:
                parameter.normal_(std=0.3)
    return model


def batch_of(rank: int, step: int, *, batch: int = 2, length: int = 12, seed: int = 1) -> torch.Tensor:
    """Token ids ``[batch, length]`` of one rank's step."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step * 101 + rank)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)
