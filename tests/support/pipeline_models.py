"""A small MoE model that is cut into pipeline stages, in float64."""

import torch
from torch import Tensor, nn

EXPERTS, TOP_K, HIDDEN, VOCABULARY = 8, 2, 16, 32


class Block(nn.Module):
    def __init__(self) -> None:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        super().__init__()
        config = MixtralConfig(hidden_size=HIDDEN, intermediate_size=16, num_local_experts=EXPERTS, hidden_act="silu")
        config._experts_implementation = "eager"
        self.mix = nn.Linear(HIDDEN, HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = MixtralExperts(config)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        hidden_TD = hidden_TD + torch.tanh(self.mix(hidden_TD))
        normed_TD = nn.functional.rms_norm(hidden_TD, (HIDDEN,))
        weights_TK, ids_TK = self.router(normed_TD).softmax(dim=-1).topk(TOP_K)
        return hidden_TD + self.experts(normed_TD, ids_TK, weights_TK)


class Stage(nn.Module):
    """Some blocks, with the embedding before the first and the head behind the last."""

    def __init__(self, number: int, stages: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN) if number == 0 else None
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(HIDDEN, VOCABULARY) if number == stages - 1 else None

    def forward(self, incoming: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The mask says which tokens are real: `attach` asks for it, the blocks need none."""
        hidden_TD = incoming if self.embed is None else self.embed(incoming)
        for block in self.blocks:
            hidden_TD = block(hidden_TD)
        return hidden_TD if self.head is None else self.head(hidden_TD)


def make_stages(blocks_of_stage: tuple[int, ...]) -> list[Stage]:
    """The same on every rank."""
    torch.manual_seed(0)
    stages = [Stage(number, len(blocks_of_stage), blocks) for number, blocks in enumerate(blocks_of_stage)]
    for stage in stages:
        for name, parameter in stage.named_parameters():
            nn.init.normal_(parameter, std=1.0 if "router" in name or "embed" in name else 0.2)
        stage.double()
    return stages


def micro_batch(replica: int, step: int, number: int, tokens: int) -> tuple[Tensor, Tensor]:
    """int64 ``[T]`` each: what comes in, and what is to come out."""
    generator = torch.Generator().manual_seed(1 + number + 100 * step + 10_000 * replica)
    ids = torch.randint(0, VOCABULARY, (2, tokens), generator=generator)
    return ids[0], ids[1]
