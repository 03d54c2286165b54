"""Targets with recurrent layers beside full attention: gated delta nets, short convolutions, Mamba2, KDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.zoo import processors
from tests.zoo.attention import EXPERTS, FULL, IMAGE_PROMPT, tower
from tests.zoo.member import LAYERS, TEXT, Member, config, register, wrapped

DELTA_NET: dict[str, Any] = dict(
    linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
    linear_num_value_heads=4,
)  # fmt: skip
ROPE: dict[str, Any] = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25)
MROPE = dict(ROPE, mrope_section=[1, 1, 0], mrope_interleaved=True)
TOWER = tower(2, deepstack_visual_indexes=[], num_position_embeddings=64)
SHORT_CONVOLUTIONS = dict(conv_L_cache=3, layer_types=["conv", FULL, "conv", FULL, "conv"])


def with_interval(made: Callable[[], Any]) -> Callable[[], Any]:
    """As in the checkpoints on the hub: SGLang reads it in place of `layer_types`. Layer 3 attends fully."""

    def make() -> Any:
        out = made()
        out.get_text_config().full_attention_interval = 4
        return out

    return make


def qwen35(**changes: Any) -> Callable[[], Any]:
    """The text model of Qwen3.5 and Qwen3.6, dense."""
    return with_interval(config("Qwen3_5TextConfig", **{**DELTA_NET, "rope_parameters": ROPE, **changes}))


def remembering(model: Any) -> None:
    """Slow decays: a state remembers tens to hundreds of tokens, so that a wrong one shows long after."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.copy_(torch.linspace(0.002, 0.1, parameter.numel()).log().view_as(parameter))


def remembering_in_large_steps(model: Any) -> None:
    """As `remembering`. The time steps stay above transformers' `time_step_min`, which SGLang does not know."""
    remembering(model)
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()))


def nemotron_h() -> Any:
    """Mamba2, attention and MLP as layers of their own, named as on the hub: SGLang does not know other names."""
    from transformers import NemotronHConfig

    pattern = "M*-M-"

    class Published(NemotronHConfig):
        def to_dict(self) -> dict[str, Any]:
            fields = super().to_dict()
            del fields["layers_block_type"]
            return {**fields, "hybrid_override_pattern": pattern, "mamba_n_groups": self.n_groups}

    sizes = dict(mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=16, n_groups=2, chunk_size=64)
    return Published(**TEXT, hybrid_override_pattern=pattern, **sizes)


def kimi_k3() -> Any:
    """The text model of Kimi-K3 without its experts, attention residuals and full-rank gates. What is left is
    Kimi-Linear, which transformers has; SGLang's class of that name hands out no features.

    Heads have the sizes on the hub, for which there are kernels. Layer 3 attends fully, through latents.
    """
    from transformers import KimiLinearConfig

    shape = dict(
        **{key: value for key, value in TEXT.items() if key not in ("head_dim", "num_key_value_heads")},
        num_key_value_heads=TEXT["num_attention_heads"],
        q_lora_rank=64,  # so that latents begin where a kernel of norms can read them
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rms_norm_eps=1e-5,  # SGLang has it for the gated norms whatever the config says
        first_k_dense_replace=LAYERS,
        linear_attn_config=dict(
            kda_layers=[1, 2, 3, 5],  # counted from 1
            full_attn_layers=[4],
            num_heads=2,
            head_dim=128,
            short_conv_kernel_size=4,
        ),
    )

    class Published(KimiLinearConfig):
        def to_dict(self) -> dict[str, Any]:
            """The fields that SGLang knows."""
            names = dict(model_type="kimi_linear", architectures=["KimiK3LinearForCausalLM"], dtype="float32")
            return {**shape, **names, "num_experts": None, "mla_use_nope": True}

    return Published(**shape)


ON_A_GRID = dict(finish=remembering, prefix_grid=64)
WIDE = dict(head_dim=64, linear_key_head_dim=128, linear_value_head_dim=128)

register(
    Member("Qwen3.5", "Qwen3_5ForCausalLM", qwen35(), **ON_A_GRID),
    Member(  # as released: the text model in a wrapper, M-RoPE positions
        "Qwen3.5 with vision",
        "Qwen3_5ForConditionalGeneration",
        with_interval(
            wrapped("Qwen3_5Config", dict(TEXT, **DELTA_NET, rope_parameters=MROPE), TOWER, **processors.IMAGE_IDS)
        ),
        processor=processors.qwen3_vl,
        image_prompt=IMAGE_PROMPT,
        **ON_A_GRID,
    ),
    Member(  # and Qwen3-Coder-Next: experts in every layer
        "Qwen3-Next",
        "Qwen3NextForCausalLM",
        with_interval(
            config(
                "Qwen3NextConfig",
                rope_parameters=ROPE,
                shared_expert_intermediate_size=32,
                **DELTA_NET,
                **EXPERTS,
            )
        ),
        **ON_A_GRID,
    ),
    Member(  # head sizes of the checkpoints on the hub, for which there are kernels of FlashInfer
        "Qwen3.5, wide heads",
        "Qwen3_5ForCausalLM",
        qwen35(**WIDE),
        draft=dict(head_dim=64),
        on_gpu_only="as Qwen3.5 but for the kernels that it takes on a GPU",
        **ON_A_GRID,
    ),
    # Short convolutions, whose state is the last two inputs; layers 1 and 3 attend fully. SGLang keeps their
    # states wherever a prefix ends, and serves them without overlap, in pages of one token.
    Member(
        "LFM2",
        "Lfm2ForCausalLM",
        config("Lfm2Config", "head_dim", block_auto_adjust_ff_dim=False, **SHORT_CONVOLUTIONS),
    ),
    Member(
        "LFM2-MoE",
        "Lfm2MoeForCausalLM",
        config("Lfm2MoeConfig", "head_dim", num_dense_layers=1, **EXPERTS, **SHORT_CONVOLUTIONS),
    ),
    Member("Nemotron-H", "NemotronHForCausalLM", nemotron_h, finish=remembering_in_large_steps, prefix_grid=64),
    Member(
        "Kimi-K3",
        "KimiLinearForCausalLM",
        kimi_k3,
        # SGLang leaves overlap on for the text model, although it has no buffer of states for the prefix cache.
        arguments=dict(disable_overlap_schedule=True, attention_backend="triton"),
        draft=dict(dflash_config=dict(target_layer_ids=[0, 2, 4])),  # it captures in layer order
        on_gpu_only="SGLang's kernels of KDA are for GPUs",
        finish=remembering_in_large_steps,
        renamed={".block_sparse_moe.": ".mlp."},
    ),
)
