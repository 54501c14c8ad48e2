"""The joint loss: its teachers, its sums over micro-batches, and whom its gradients reach."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Literal

import pytest
import torch
import transformers as hf
from transformers import PreTrainedConfig

from infra.errors import UserError
from medusa_core.adapters import add_lora, untie
from medusa_core.heads import HeadsConfig, MedusaHeads
from tasks.joint_objective import Batch, Conversation, JointObjective, Teacher
from tasks.teacher import top_k_with_tail
from tests.medusa_core.chaos import VOCAB, chaotic_config, tiny

COUNTS = torch.full((2,), 10.0)


def objective(
    teacher: Teacher = "adapter_off",
    *,
    learnt: bool = True,
    config: PreTrainedConfig | None = None,
    layout: HeadsConfig | None = None,
) -> JointObjective:
    """A tiny model with an adapter that has moved it (or has not), and two heads."""
    model = tiny(config or chaotic_config(tie_word_embeddings=True), torch.float32)
    untie(model)
    heads = MedusaHeads.on(model, layout or HeadsConfig(num_heads=2, vocab=None))
    adapted = add_lora(model, rank=4, alpha=8, dropout=0.0)
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if learnt and "lora_B" in name:
            parameter.data.normal_(std=0.03)
    return JointObjective(adapted, heads, decay=0.8, teacher=teacher)


def conversation(seed: int, prompt: int, answer: int) -> Conversation:
    ids = torch.randint(VOCAB, (prompt + answer,), generator=torch.Generator().manual_seed(seed))
    return Conversation(ids, torch.arange(prompt + answer) >= prompt, torch.arange(prompt - 1, prompt + answer - 1))


def batch(*conversations: Conversation) -> Batch:
    return Batch.of(conversations, num_heads=2, device=torch.device("cpu"))


def losses(joint: JointObjective, given: Batch, share: float = 0.2) -> list[float]:
    return [float(part) for part in joint(given, positions=10.0, counts_K=COUNTS, heads_share=share)]


def with_top_k(joint: JointObjective, one: Conversation, k: int) -> Conversation:
    """The conversation with what the teacher stage would have kept of it."""
    given = batch(one)
    logits_PV = joint.logits(joint.teacher_hidden(given), as_it_was=True)
    return replace(one, teacher=top_k_with_tail(logits_PV, k))


def test_the_cached_teacher_bounds_the_live_one_from_below(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches positions of the cache that slip against the student's: off by one, it would exceed the full KL."""
    live = objective()
    one = conversation(1, 4, 9)
    full = losses(live, batch(one))[1]
    cached = copy.deepcopy(live)
    cached.teacher = "top_k"
    found = {k: losses(cached, batch(with_top_k(live, one, k)))[1] for k in (2, 8, VOCAB)}
    with capsys.disabled():
        print(f"\nL_LM with the adapter off {full:.4f}; from a cached top-k: {found}")
    assert 0 < found[2] < found[8] <= full
    assert found[VOCAB] == pytest.approx(full, rel=1e-4)


def test_at_step_zero_the_backbone_has_nothing_to_learn_but_from_the_heads() -> None:
    """Catches a teacher with dropout or adapter on, and heads' gradients that stop at the hidden state."""
    joint = objective(learnt=False).train()
    given = batch(conversation(1, 4, 9))
    total, lm, heads = joint(given, positions=10.0, counts_K=COUNTS, heads_share=0.0)
    assert float(lm) == pytest.approx(0.0, abs=1e-5) and float(heads) > 0.1
    total.backward()
    reached = [p for name, p in joint.model.named_parameters() if p.requires_grad and "lora_B" in name]
    assert max(float(p.grad.abs().max()) for p in reached if p.grad is not None) < 1e-4
    total, *_ = joint(given, positions=10.0, counts_K=COUNTS, heads_share=1.0)
    total.backward()
    moved = [
        name for name, p in joint.model.named_parameters() if p.grad is not None and float(p.grad.abs().max()) > 1e-4
    ]
    assert any("q_proj.lora_B" in name for name in moved) and all("lora_" in name for name in moved)


@pytest.mark.parametrize("teacher", ["adapter_off", "data"])
def test_a_padded_batch_is_the_sum_of_its_conversations(teacher: Teacher) -> None:
    """Catches padding that is seen or counted, and rows whose positions are mixed up."""
    joint = objective(teacher)
    some = [conversation(1, 4, 9), conversation(2, 2, 3), conversation(3, 7, 5)]
    alone = torch.tensor([losses(joint, batch(one)) for one in some]).sum(0)
    torch.testing.assert_close(torch.tensor(losses(joint, batch(*some))), alone, rtol=1e-4, atol=1e-4)


def test_the_text_itself_as_teacher_is_cross_entropy() -> None:
    joint, one = objective("data"), conversation(1, 4, 9)
    with torch.no_grad():
        logits = joint.backbone(input_ids=one.input_ids_T[None]).logits[0]
    expected = torch.nn.functional.cross_entropy(logits[3:-1], one.input_ids_T[4:], reduction="sum") / 10
    assert losses(joint, batch(one))[1] == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("teacher", ["adapter_off", "data"])
def test_a_micro_batch_without_labels_gives_zero_and_reaches_the_same_parameters(teacher: Teacher) -> None:
    """Catches a rank whose backward leaves parameters out: the other ranks would wait for them for ever."""
    joint, given = objective(teacher), batch(conversation(1, 4, 9))

    def reached(chosen: Batch) -> set[str]:
        joint.zero_grad()
        total, *_ = joint(chosen, positions=10.0, counts_K=COUNTS, heads_share=0.2)
        total.backward()
        return {name for name, p in joint.named_parameters() if p.grad is not None}

    assert losses(joint, given.empty()) == [0.0, 0.0, 0.0]
    assert reached(given.empty()) == reached(given) != set()


@pytest.mark.parametrize("lm_head", ["shared", "low_rank"])
def test_a_shared_projection_learns_with_the_lm_head(lm_head: Literal["shared", "low_rank"]) -> None:
    """Catches heads trained against the LM head that the backbone had, where it is the LM head of today they share."""
    layout = HeadsConfig(num_heads=2, vocab=None, lm_head=lm_head)
    joint, given = objective(layout=layout), batch(conversation(1, 4, 9))
    before = losses(joint, given)[2]
    output = joint.backbone.get_output_embeddings()
    output.lora_B["default"].weight.data *= 3
    assert losses(joint, given)[2] != pytest.approx(before, rel=1e-3)


def test_heads_that_see_the_path_see_the_true_one() -> None:
    """Catches a path of another conversation's, or shifted: the loss must be that of each position by itself."""
    joint = objective(layout=HeadsConfig(kind="hydra", num_heads=2, vocab=None, block="mlp"))
    for parameter in joint.heads.parameters():
        parameter.data.normal_(std=0.2)
    some = [conversation(1, 4, 9), conversation(2, 3, 5)]
    expected = 0.0
    for one in some:
        hidden = joint.hidden(batch(one))
        for row, t in enumerate(one.position_P.tolist()):
            for head in range(2):
                if t + head + 2 < len(one.input_ids_T):
                    path = torch.nn.functional.pad(one.input_ids_T[t + 1 : t + 2 + head], (0, 1 - head))
                    logits = joint.heads(hidden[row : row + 1], path[None])[head, 0]
                    share = 0.8 ** (head + 1) / float(COUNTS[head])
                    expected -= share * float(logits.log_softmax(-1)[one.input_ids_T[t + head + 2]])
    assert losses(joint, batch(*some))[2] == pytest.approx(expected, rel=1e-4)


GEMMA2 = hf.Gemma2Config(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, final_logit_softcapping=2.0, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
COHERE = hf.CohereConfig(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, logit_scale=0.25, eos_token_id=None, pad_token_id=0,
)  # fmt: skip


def test_logits_are_the_model_s_or_the_model_is_refused() -> None:
    """Catches a soft cap left out, and logits that are scaled where this module doesn't see it."""
    objective(config=GEMMA2).check()
    objective().check()
    with pytest.raises(UserError, match="in a way of its own"):
        objective(config=COHERE).check()


def test_there_is_no_adapter_to_switch_off_without_one() -> None:
    model = tiny(chaotic_config(), torch.float32)
    heads = MedusaHeads(
        HeadsConfig(num_heads=2, vocab=None), lm_weight_VD=model.get_output_embeddings().weight.detach()
    )
    with pytest.raises(UserError, match="there is no adapter"):
        JointObjective(model, heads, decay=0.8, teacher="adapter_off")


def test_gradient_checkpointing_keeps_less_and_gives_the_same_gradients() -> None:
    """Catches checkpointing that is asked for and not switched on (a model in eval mode, a wrapper that hides it)."""
    kept, gradients = [], []
    for checkpointing in (False, True):
        joint = objective().train()
        if checkpointing:
            joint.save_memory()
        sizes: list[int] = []

        def note(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            total, *_ = joint(batch(conversation(1, 4, 40)), positions=10.0, counts_K=COUNTS, heads_share=0.2)
        total.backward()
        kept.append(sum(sizes))
        gradients.append([p.grad for p in joint.parameters() if p.grad is not None])
    assert kept[1] < 0.7 * kept[0]
    assert len(gradients[0]) == len(gradients[1]) > 0
    for without, saving in zip(*gradients, strict=True):
        torch.testing.assert_close(without, saving, rtol=1e-5, atol=1e-7)
