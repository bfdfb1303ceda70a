"""A whole loop of reinforcement learning in small: a Megatron actor on 4 ranks (2 pipeline stages x 2 expert-parallel
ranks), rollouts by Transformers' ``generate`` from exported weights while the actor's memory is freed, replayed and
declared routing, a loss as GRPO's by Megatron's own schedule. Fixed and balanced, to the bit.

What frees and loads is of `test_megatron_phases`, the job of `megatron_jobs`; Megatron's weights are brought
into a Mixtral here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import megatron_jobs
import pytest
import torch
from digests import digests
from ranks import run_ranks
from torch import Tensor

import eplb_runtime as eplb

pytestmark = megatron_jobs.long_megatron
ROUNDS, GROUP, PROMPT, NEW, MICRO_BATCHES = 3, 2, 4, 6, 2
LENGTH, HEADS, GROUPS, WIDTH = PROMPT + NEW, 4, 2, 8
STATE = dict[str, Tensor]


def job_of(**options: Any) -> Any:
    """Megatron's own modules in the form of a Mixtral, in float32 unless the options say otherwise."""
    import megatron_jobs as jobs
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.moe.router_replay import RouterReplay

    RouterReplay.clear_global_router_replay_instances()

    class Actor(jobs.Job):
        def _chunk(self, number: int, chunks: int, ddp: Any, share: bool) -> Any:
            spec = get_gpt_decoder_block_spec(self.config, use_transformer_engine=False, normalization="RMSNorm")
            stage = parallel_state.get_pipeline_model_parallel_rank()
            torch.manual_seed(stage)
            model = GPTModel(
                self.config,
                spec,
                vocab_size=jobs.VOCABULARY,
                max_sequence_length=LENGTH,
                pre_process=parallel_state.is_pipeline_first_stage(),
                post_process=parallel_state.is_pipeline_last_stage(),
                position_embedding_type="rope",
                share_embeddings_and_output_weights=False,
            )
            for name, parameter in model.named_parameters():
                place = 2 * stage + parallel_state.get_expert_model_parallel_rank() * (".experts." in name)
                generator = torch.Generator().manual_seed(jobs.hash_of(name) + place)
                if "norm" not in name:
                    parameter.data.normal_(std=0.3, generator=generator)
            return DistributedDataParallel(
                self.config, ddp, Float16Module(self.config, model) if self.config.bf16 else model
            )

    return Actor(
        bf16=options.pop("bf16", False),
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        num_query_groups=GROUPS,
        apply_rope_fusion=False,
        moe_enable_routing_replay=True,
        **options,
    )


def rollout_model() -> Any:
    import megatron_jobs as jobs
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=jobs.VOCABULARY,
        hidden_size=jobs.HIDDEN,
        intermediate_size=jobs.HIDDEN,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        num_local_experts=jobs.EXPERTS,
        num_experts_per_tok=2,
        rms_norm_eps=1e-5,
        sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        attn_implementation="eager",
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return MixtralForCausalLM(config).eval()


@torch.no_grad()
def load_exported(model: Any, exported: STATE) -> None:
    """Bring Megatron's tensors, under their names over the whole model, into Mixtral's."""
    state = {
        "model.embed_tokens.weight": exported["embedding.word_embeddings.weight"],
        "model.norm.weight": exported["decoder.final_layernorm.weight"],
        "lm_head.weight": exported["output_layer.weight"],
    }
    for number, layer in enumerate(model.model.layers):
        own, into = f"decoder.layers.{number}.", f"model.layers.{number}."
        state[f"{into}input_layernorm.weight"] = exported[f"{own}input_layernorm.weight"]
        state[f"{into}post_attention_layernorm.weight"] = exported[f"{own}pre_mlp_layernorm.weight"]
        qkv = exported[f"{own}self_attention.linear_qkv.weight"].unflatten(0, (GROUPS, HEADS // GROUPS + 2, WIDTH))
        for name, part in {"q": qkv[:, :-2], "k": qkv[:, -2:-1], "v": qkv[:, -1:]}.items():
            state[f"{into}self_attn.{name}_proj.weight"] = part.flatten(0, 2)
        state[f"{into}self_attn.o_proj.weight"] = exported[f"{own}self_attention.linear_proj.weight"]
        state[f"{into}mlp.gate.weight"] = exported[f"{own}mlp.router.weight"]
        for whole, part in {"gate_up_proj": "linear_fc1", "down_proj": "linear_fc2"}.items():
            names = [f"{own}mlp.experts.local_experts.{expert}.{part}.weight" for expert in range(8)]
            state[f"{into}mlp.experts.{whole}"] = torch.stack([exported[name] for name in names])
        assert layer is not None
    model.load_state_dict(state)


@torch.no_grad()
def roll_out(model: Any, seed: int) -> dict[str, Tensor]:
    """Samples ``[S, LENGTH]``, their advantages, log-probabilities ``[S, LENGTH - 1]`` and routing ``[S, ..., L, K]``
    as Megatron sees tokens: without the last, which predicts nothing."""
    torch.manual_seed(seed)
    prompts = torch.randint(0, 16, (2, PROMPT)).repeat_interleave(GROUP, dim=0)
    tokens = model.generate(prompts, do_sample=True, max_new_tokens=NEW, min_new_tokens=NEW)
    rewards = (tokens[:, PROMPT:] % 2 == 0).float().mean(dim=1).view(-1, GROUP)
    advantages = (rewards - rewards.mean(dim=1, keepdim=True)) / (rewards.std(dim=1, keepdim=True) + 1e-4)
    out = model(input_ids=tokens[:, :-1], output_router_logits=True)
    chosen = out.logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    routing = [logits.view(len(tokens), LENGTH - 1, -1).topk(2, dim=-1).indices for logits in out.router_logits]
    return {
        "tokens": tokens,
        "advantages": advantages.flatten(),
        "old": chosen,
        "routing": torch.stack(routing, dim=2),
    }


def train_on(job: Any, samples: dict[str, Tensor], layers: list[int]) -> tuple[list[float], list[float], float]:
    """Losses and ratios of micro-batches on the last stage, and the gradient norm; routing is replayed."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    def batches() -> Iterator[dict[str, Tensor]]:
        for number in range(MICRO_BATCHES):
            yield {name: values[2 * number : 2 * number + 2] for name, values in samples.items()}

    def forward_step(data: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch = next(data)
        ids, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        RouterReplay.set_replay_data([batch["routing"][:, :, layer].transpose(0, 1).flatten(0, 1) for layer in layers])
        causal = torch.ones(1, 1, LENGTH - 1, LENGTH - 1, dtype=torch.bool).triu(1)
        positions = torch.arange(LENGTH - 1).expand_as(ids)
        output = model(input_ids=ids, position_ids=positions, attention_mask=causal, labels=labels.contiguous())

        def loss_of(entropies: Tensor) -> tuple[Tensor, Any]:
            ratio = (-entropies.float() - batch["old"]).exp()[:, PROMPT - 1 :]
            advantages = batch["advantages"].unsqueeze(1)
            loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
            return loss, (loss.item(), (ratio - 1).abs().max().item())

        return output, loss_of

    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    for model in job.models:
        model.zero_grad_buffer()
    job.optimizer.zero_grad()
    seen = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches(),
        model=job.models,
        num_microbatches=MICRO_BATCHES,
        seq_length=LENGTH - 1,
        micro_batch_size=2,
        forward_only=False,
    )
    _, norm, _ = job.optimizer.step()
    RouterReplay.clear_global_indices()
    return [loss for loss, _ in seen], [ratio for _, ratio in seen], float(norm)


def loop(
    policy: str,
    wrong: bool = False,
    phases_of: Any = None,
    prepare: Callable[[Any], None] = id,
    rounds: int = ROUNDS,
    **options: Any,
) -> dict[str, Any]:
    """Rounds of export, rollout and training.

    Args:
        wrong: the engine gets experts 0 and 1 of a layer in each other's place.
        phases_of: what frees and loads a model and its optimizer; those of `test_megatron_phases` otherwise.
        prepare: called with the balancer.
        options: as of `megatron_jobs.Job`.
    """
    from megatron.core import parallel_state
    from test_megatron_phases import Phases

    phases_of = phases_of or Phases
    job, engine = job_of(**options), rollout_model()
    config = eplb.BalancerConfig(interval=None, gate="always", policy=policy)
    balancer = eplb.attach(job.models, job.optimizer, config=config)
    balancer._wait_until_compiled()
    prepare(balancer)
    (model,) = job.models
    found: dict[str, Any] = {"seen": [], "exports": [], "tokens": [], "freed": []}
    stage = parallel_state.get_pipeline_model_parallel_rank()
    for number in range(rounds):
        exported = dict(balancer.named_logical_tensors())
        found["exports"].append(digests(exported))
        if wrong:
            first, second = (f"decoder.layers.1.mlp.experts.local_experts.{one}.linear_fc1.weight" for one in (0, 1))
            exported[first], exported[second] = exported[second], exported[first]
        load_exported(engine, exported)
        phases = phases_of(model, job.optimizer)
        found["freed"].append(balancer.suspend())
        phases.free()
        samples = roll_out(engine, 10 * number + parallel_state.get_data_parallel_rank())
        phases.load()
        balancer.resume()
        if policy != "static":
            balancer.declare([part.flatten(0, 1) for part in samples["routing"].chunk(MICRO_BATCHES)])
        balancer.rebalance()
        found["seen"].append(train_on(job, samples, [2 * stage, 2 * stage + 1]))
        found["tokens"].append(samples["tokens"])
    measured = [event.imbalance for event in balancer.events if type(event).__name__ == "LoadMeasured"]
    found |= {
        "tensors": job.tensors(balancer.placement),
        "moved": sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts")),
        "imbalance": [sum(map(sum, rows)) / sum(map(len, rows)) for rows in measured],
        "checked": balancer.verify_export(balancer.named_logical_tensors),
    }
    balancer.close()
    return found


def everything(rank: int) -> dict[str, Any]:
    import megatron_jobs as jobs

    jobs.prepare(pipeline_model_parallel_size=2)
    return {
        "static": loop("static"),
        "balanced": loop("incremental"),
        "wrong": loop("static", wrong=True, rounds=1),
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(4, everything)


def test_the_whole_loop_gives_the_same_bits_wherever_experts_are(results: list[dict[str, Any]]) -> None:
    for found in results:
        static, balanced = found["static"], found["balanced"]
        assert static["moved"] == 0 < balanced["moved"] and min(balanced["freed"]) > 0
        assert all(map(torch.equal, static["tokens"], balanced["tokens"])), "rollouts"
        assert static["seen"] == balanced["seen"] and static["exports"] == balanced["exports"]
        assert "are equal to the model's" in balanced["checked"]


def test_weights_masters_and_moments_are_the_same(results: list[dict[str, Any]]) -> None:
    whole: list[dict[Any, Tensor]] = [{}, {}]
    for found in results:
        for way, into in zip(("static", "balanced"), whole, strict=True):
            into.update(found[way]["tensors"])
    static, balanced = whole
    assert static.keys() == balanced.keys() and len({key[:2] for key in static if key[0] != "dense"}) == 4 * 8
    assert [key for key in static if not torch.equal(static[key], balanced[key])] == []


def test_rollouts_are_by_the_weights_that_are_trained(results: list[dict[str, Any]]) -> None:
    last_stage = [found for found in results if found["static"]["seen"][0][0]]
    assert last_stage
    for found in last_stage:
        ratios, wrong = (max(max(seen[1]) for seen in found[way]["seen"]) for way in ("balanced", "wrong"))
        print("largest |ratio - 1|", ratios, wrong)
        assert ratios < 1e-3 < wrong


def test_declared_routing_evens_the_load(results: list[dict[str, Any]]) -> None:
    for found in results:
        static, balanced = (found[way]["imbalance"] for way in ("static", "balanced"))
        print([round(value, 3) for value in static], [round(value, 3) for value in balanced])
        assert sum(balanced[1:]) < sum(static[1:])
