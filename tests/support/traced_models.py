"""Weights of published models, counted by hand from the sizes in their configs.

By the config's name in ``tests/data/configs/traced``: each weight's module with ``*`` for a layer's
number, its out and in features, and how often one forward pass multiplies by it; all experts of a
layer count once. Formulas are written out where a size is no value of the config.
"""

from __future__ import annotations

Weights = dict[str, tuple[int, int, int]]


def _prefixed(prefix: str, weights: Weights) -> Weights:
    return {f"{prefix}{name}": sizes for name, sizes in weights.items()}


_SIGLIP_LAYER: Weights = {  # hidden 1152, intermediate 4304, 27 layers
    "self_attn.q_proj": (1152, 1152, 27),
    "self_attn.k_proj": (1152, 1152, 27),
    "self_attn.v_proj": (1152, 1152, 27),
    "self_attn.out_proj": (1152, 1152, 27),
    "mlp.fc1": (4304, 1152, 27),
    "mlp.fc2": (1152, 4304, 27),
}

WEIGHTS: dict[str, Weights] = {
    "gemma-3-4b": {
        **_prefixed("model.vision_tower.encoder.layers.*.", _SIGLIP_LAYER),
        "model.multi_modal_projector.mm_input_projection_weight": (2560, 1152, 1),
        **_prefixed(
            "model.language_model.layers.*.",
            {
                "self_attn.q_proj": (8 * 256, 2560, 34),
                "self_attn.k_proj": (4 * 256, 2560, 34),
                "self_attn.v_proj": (4 * 256, 2560, 34),
                "self_attn.o_proj": (2560, 8 * 256, 34),
                "mlp.gate_proj": (10240, 2560, 34),
                "mlp.up_proj": (10240, 2560, 34),
                "mlp.down_proj": (2560, 10240, 34),
            },
        ),
        "lm_head": (262208, 2560, 1),
    },
    "mistral-7b-v0.3": {
        **_prefixed(
            "model.layers.*.",
            {
                "self_attn.q_proj": (4096, 4096, 32),
                "self_attn.k_proj": (8 * 128, 4096, 32),
                "self_attn.v_proj": (8 * 128, 4096, 32),
                "self_attn.o_proj": (4096, 4096, 32),
                "mlp.gate_proj": (14336, 4096, 32),
                "mlp.up_proj": (14336, 4096, 32),
                "mlp.down_proj": (4096, 14336, 32),
            },
        ),
        "lm_head": (32768, 4096, 1),
    },
    "mistral-small-3.1-24b": {
        **_prefixed(
            "model.vision_tower.transformer.layers.*.",
            {
                "attention.q_proj": (1024, 1024, 24),
                "attention.k_proj": (1024, 1024, 24),
                "attention.v_proj": (1024, 1024, 24),
                "attention.o_proj": (1024, 1024, 24),
                "feed_forward.gate_proj": (4096, 1024, 24),
                "feed_forward.up_proj": (4096, 1024, 24),
                "feed_forward.down_proj": (1024, 4096, 24),
            },
        ),
        "model.multi_modal_projector.patch_merger.merging_layer": (1024, 2 * 2 * 1024, 1),
        "model.multi_modal_projector.linear_1": (5120, 1024, 1),
        "model.multi_modal_projector.linear_2": (5120, 5120, 1),
        **_prefixed(
            "model.language_model.layers.*.",
            {
                "self_attn.q_proj": (32 * 128, 5120, 40),
                "self_attn.k_proj": (8 * 128, 5120, 40),
                "self_attn.v_proj": (8 * 128, 5120, 40),
                "self_attn.o_proj": (5120, 32 * 128, 40),
                "mlp.gate_proj": (32768, 5120, 40),
                "mlp.up_proj": (32768, 5120, 40),
                "mlp.down_proj": (5120, 32768, 40),
            },
        ),
        "lm_head": (131072, 5120, 1),
    },
    "qwen2-7b": {
        **_prefixed(
            "model.layers.*.",
            {
                "self_attn.q_proj": (3584, 3584, 28),
                "self_attn.k_proj": (4 * 128, 3584, 28),
                "self_attn.v_proj": (4 * 128, 3584, 28),
                "self_attn.o_proj": (3584, 3584, 28),
                "mlp.gate_proj": (18944, 3584, 28),
                "mlp.up_proj": (18944, 3584, 28),
                "mlp.down_proj": (3584, 18944, 28),
            },
        ),
        "lm_head": (152064, 3584, 1),
    },
    "qwen1.5-moe-a2.7b": {
        **_prefixed(
            "model.layers.*.",
            {
                "self_attn.q_proj": (2048, 2048, 24),
                "self_attn.k_proj": (2048, 2048, 24),
                "self_attn.v_proj": (2048, 2048, 24),
                "self_attn.o_proj": (2048, 2048, 24),
                "mlp.gate": (60, 2048, 24),
                "mlp.experts.gate_up_proj": (2 * 1408, 2048, 24),
                "mlp.experts.down_proj": (2048, 1408, 24),
                "mlp.shared_expert.gate_proj": (5632, 2048, 24),
                "mlp.shared_expert.up_proj": (5632, 2048, 24),
                "mlp.shared_expert.down_proj": (2048, 5632, 24),
                "mlp.shared_expert_gate": (1, 2048, 24),
            },
        ),
        "lm_head": (151936, 2048, 1),
    },
    "qwen3-next-80b-a3b": {
        **_prefixed(
            "model.layers.*.",
            {
                # One layer of four has attention, whose queries come with gates.
                "self_attn.q_proj": (2 * 16 * 256, 2048, 12),
                "self_attn.k_proj": (2 * 256, 2048, 12),
                "self_attn.v_proj": (2 * 256, 2048, 12),
                "self_attn.o_proj": (2048, 16 * 256, 12),
                # q and k of 16 heads, v and z of 32, of 128 each
                "linear_attn.in_proj_qkvz": (2 * 16 * 128 + 2 * 32 * 128, 2048, 36),
                "linear_attn.in_proj_ba": (2 * 32, 2048, 36),
                "linear_attn.out_proj": (2048, 32 * 128, 36),
                "mlp.gate": (512, 2048, 48),
                "mlp.experts.gate_up_proj": (2 * 512, 2048, 48),
                "mlp.experts.down_proj": (2048, 512, 48),
                "mlp.shared_expert.gate_proj": (512, 2048, 48),
                "mlp.shared_expert.up_proj": (512, 2048, 48),
                "mlp.shared_expert.down_proj": (2048, 512, 48),
                "mlp.shared_expert_gate": (1, 2048, 48),
            },
        ),
        "lm_head": (151936, 2048, 1),
    },
    "phi-3-mini": {
        **_prefixed(
            "model.layers.*.",
            {
                "self_attn.qkv_proj": (3 * 3072, 3072, 32),
                "self_attn.o_proj": (3072, 3072, 32),
                "mlp.gate_up_proj": (2 * 8192, 3072, 32),
                "mlp.down_proj": (3072, 8192, 32),
            },
        ),
        "lm_head": (32064, 3072, 1),
    },
    "olmo-2-7b": {
        **_prefixed(
            "model.layers.*.",
            {
                "self_attn.q_proj": (4096, 4096, 32),
                "self_attn.k_proj": (4096, 4096, 32),
                "self_attn.v_proj": (4096, 4096, 32),
                "self_attn.o_proj": (4096, 4096, 32),
                "mlp.gate_proj": (11008, 4096, 32),
                "mlp.up_proj": (11008, 4096, 32),
                "mlp.down_proj": (4096, 11008, 32),
            },
        ),
        "lm_head": (100352, 4096, 1),
    },
    "olmoe-1b-7b": {
        **_prefixed(
            "model.layers.*.",
            {
                "self_attn.q_proj": (2048, 2048, 16),
                "self_attn.k_proj": (2048, 2048, 16),
                "self_attn.v_proj": (2048, 2048, 16),
                "self_attn.o_proj": (2048, 2048, 16),
                "mlp.gate": (64, 2048, 16),
                "mlp.experts.gate_up_proj": (2 * 1024, 2048, 16),
                "mlp.experts.down_proj": (2048, 1024, 16),
            },
        ),
        "lm_head": (50304, 2048, 1),
    },
    "glm-4.5-air": {
        **_prefixed(
            "model.layers.*.",
            {
                "self_attn.q_proj": (96 * 128, 4096, 46),
                "self_attn.k_proj": (8 * 128, 4096, 46),
                "self_attn.v_proj": (8 * 128, 4096, 46),
                "self_attn.o_proj": (4096, 96 * 128, 46),
                # The first layer is dense.
                "mlp.gate_proj": (10944, 4096, 1),
                "mlp.up_proj": (10944, 4096, 1),
                "mlp.down_proj": (4096, 10944, 1),
                "mlp.gate": (128, 4096, 45),
                "mlp.experts.gate_up_proj": (2 * 1408, 4096, 45),
                "mlp.experts.down_proj": (4096, 1408, 45),
                "mlp.shared_experts.gate_proj": (1408, 4096, 45),
                "mlp.shared_experts.up_proj": (1408, 4096, 45),
                "mlp.shared_experts.down_proj": (4096, 1408, 45),
            },
        ),
        "lm_head": (151552, 4096, 1),
    },
    "llama-4-scout": {
        "vision_model.patch_embedding.linear": (1408, 3 * 14 * 14, 1),
        **_prefixed(
            "vision_model.model.layers.*.",
            {
                "self_attn.q_proj": (1408, 1408, 34),
                "self_attn.k_proj": (1408, 1408, 34),
                "self_attn.v_proj": (1408, 1408, 34),
                "self_attn.o_proj": (1408, 1408, 34),
                "mlp.fc1": (5632, 1408, 34),
                "mlp.fc2": (1408, 5632, 34),
            },
        ),
        # Four patches are one row.
        "vision_model.vision_adapter.mlp.fc1": (4096, 4 * 1408, 1),
        "vision_model.vision_adapter.mlp.fc2": (4096, 4096, 1),
        "multi_modal_projector.linear_1": (5120, 4096, 1),
        **_prefixed(
            "language_model.model.layers.*.",
            {
                "self_attn.q_proj": (40 * 128, 5120, 48),
                "self_attn.k_proj": (8 * 128, 5120, 48),
                "self_attn.v_proj": (8 * 128, 5120, 48),
                "self_attn.o_proj": (5120, 40 * 128, 48),
                "feed_forward.router": (16, 5120, 48),
                "feed_forward.experts.gate_up_proj": (2 * 8192, 5120, 48),
                "feed_forward.experts.down_proj": (5120, 8192, 48),
                "feed_forward.shared_expert.gate_proj": (8192, 5120, 48),
                "feed_forward.shared_expert.up_proj": (8192, 5120, 48),
                "feed_forward.shared_expert.down_proj": (5120, 8192, 48),
            },
        ),
        "language_model.lm_head": (202048, 5120, 1),
    },
    "deepseek-v2-lite": {
        **_prefixed(
            "model.layers.*.",
            {
                "self_attn.q_proj": (16 * (128 + 64), 2048, 27),
                "self_attn.kv_a_proj_with_mqa": (512 + 64, 2048, 27),
                "self_attn.kv_b_proj": (16 * (128 + 128), 512, 27),
                "self_attn.o_proj": (2048, 16 * 128, 27),
                "mlp.gate_proj": (10944, 2048, 1),
                "mlp.up_proj": (10944, 2048, 1),
                "mlp.down_proj": (2048, 10944, 1),
                "mlp.gate": (64, 2048, 26),
                "mlp.experts.gate_up_proj": (2 * 1408, 2048, 26),
                "mlp.experts.down_proj": (2048, 1408, 26),
                "mlp.shared_experts.gate_proj": (2 * 1408, 2048, 26),
                "mlp.shared_experts.up_proj": (2 * 1408, 2048, 26),
                "mlp.shared_experts.down_proj": (2048, 2 * 1408, 26),
            },
        ),
        "lm_head": (102400, 2048, 1),
    },
    "granite-3.1-8b": {
        **_prefixed(
            "model.layers.*.",
            {
                "self_attn.q_proj": (4096, 4096, 40),
                "self_attn.k_proj": (8 * 128, 4096, 40),
                "self_attn.v_proj": (8 * 128, 4096, 40),
                "self_attn.o_proj": (4096, 4096, 40),
                "mlp.gate_proj": (12800, 4096, 40),
                "mlp.up_proj": (12800, 4096, 40),
                "mlp.down_proj": (4096, 12800, 40),
            },
        ),
        "lm_head": (49155, 4096, 1),
    },
    "starcoder2-7b": {
        **_prefixed(
            "model.layers.*.",
            {
                "self_attn.q_proj": (4608, 4608, 32),
                "self_attn.k_proj": (4 * 128, 4608, 32),
                "self_attn.v_proj": (4 * 128, 4608, 32),
                "self_attn.o_proj": (4608, 4608, 32),
                "mlp.c_fc": (18432, 4608, 32),
                "mlp.c_proj": (4608, 18432, 32),
            },
        ),
        "lm_head": (49152, 4608, 1),
    },
    "gpt-neox-20b": {
        **_prefixed(
            "gpt_neox.layers.*.",
            {
                "attention.query_key_value": (3 * 6144, 6144, 44),
                "attention.dense": (6144, 6144, 44),
                "mlp.dense_h_to_4h": (24576, 6144, 44),
                "mlp.dense_4h_to_h": (6144, 24576, 44),
            },
        ),
        "lm_head": (50432, 6144, 1),
    },
    "siglip-so400m-384": {
        **_prefixed("vision_model.encoder.layers.*.", _SIGLIP_LAYER),
        # Keys and values are two thirds of one weight, whose other third has a row of its own.
        "vision_model.head.attention.in_proj_weight": (2 * 1152, 1152, 1),
        "vision_model.head.attention.out_proj": (1152, 1152, 1),
        "vision_model.head.mlp.fc1": (4304, 1152, 1),
        "vision_model.head.mlp.fc2": (1152, 4304, 1),
        **_prefixed("text_model.encoder.layers.*.", _SIGLIP_LAYER),
        "text_model.head": (1152, 1152, 1),
    },
    "whisper-large-v3": {
        **_prefixed(
            "model.encoder.layers.*.",
            {
                "self_attn.q_proj": (1280, 1280, 32),
                "self_attn.k_proj": (1280, 1280, 32),
                "self_attn.v_proj": (1280, 1280, 32),
                "self_attn.out_proj": (1280, 1280, 32),
                "fc1": (5120, 1280, 32),
                "fc2": (1280, 5120, 32),
            },
        ),
        **_prefixed(
            "model.decoder.layers.*.",
            {
                "self_attn.q_proj": (1280, 1280, 32),
                "self_attn.k_proj": (1280, 1280, 32),
                "self_attn.v_proj": (1280, 1280, 32),
                "self_attn.out_proj": (1280, 1280, 32),
                "encoder_attn.q_proj": (1280, 1280, 32),
                "encoder_attn.k_proj": (1280, 1280, 32),
                "encoder_attn.v_proj": (1280, 1280, 32),
                "encoder_attn.out_proj": (1280, 1280, 32),
                "fc1": (5120, 1280, 32),
                "fc2": (1280, 5120, 32),
            },
        ),
        "proj_out": (51866, 1280, 1),
    },
}
