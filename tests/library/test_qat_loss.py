"""CAKLD against its printed equation, its gradient against autograd's and finite differences, and its chunks."""

import pytest
import torch

from rotquant.qat.loss import cakld, cakld_reference, label_probabilities


def states(dtype=torch.float64, vocabulary=37, tokens=(3, 5), hidden=8, seed=0):
    """Hidden states and heads of a student and a teacher that differ a little, as after a quantization."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    teacher, head = draw(*tokens, hidden), draw(vocabulary, hidden)
    student, own = teacher + 0.3 * draw(*tokens, hidden), head + 0.1 * draw(vocabulary, hidden)
    return tuple(tensor.to(dtype) for tensor in (student, own, teacher, head))


@pytest.mark.parametrize("chunk", [1, 4, 15, 100])
@pytest.mark.parametrize("confidence", [0.0, 0.35, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_are_those_of_the_printed_equation(chunk, confidence, seed):
    student, own, teacher, head = states(seed=seed)
    leaves = [(student.clone().requires_grad_(), own.clone().requires_grad_()) for _ in range(2)]
    found = cakld(*leaves[0], teacher, head, confidence, chunk)
    expected = cakld_reference(leaves[1][0] @ leaves[1][1].T, teacher @ head.T, confidence)
    # float64: sums in another order
    torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-12, atol=1e-14)
    (3.0 * found.loss).backward()
    (3.0 * expected.loss).backward()
    for one, other in zip(*leaves, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-11, atol=1e-14)


def test_the_gradient_is_that_of_finite_differences():
    student, own, teacher, head = states(vocabulary=7, tokens=(2, 3), hidden=4)
    leaves = student.requires_grad_(), own.requires_grad_()
    assert torch.autograd.gradcheck(lambda *pair: cakld(*pair, teacher, head, 0.35, 4).loss, leaves)


def test_a_student_that_is_the_teacher_has_nowhere_to_go():
    _, _, teacher, head = states()
    student = teacher.clone().requires_grad_()
    found = cakld(student, head, teacher, head, 0.35)
    found.loss.backward()
    assert max(abs(part.item()) for part in found) < 1e-14
    assert student.grad.abs().max() < 1e-15


def test_a_tensor_that_is_frozen_gets_no_gradient():
    student, own, teacher, head = states()
    cakld(student, own.requires_grad_(), teacher, head, 0.35).loss.backward()
    assert student.grad is None
    assert own.grad.abs().max() > 0
    assert cakld(student, own.detach(), teacher, head, 0.35).loss.requires_grad is False


def test_hidden_states_in_16_bits_have_a_loss_in_32():
    exact = cakld(*states(), 0.35)
    found = cakld(*states(torch.bfloat16), 0.35)
    assert found.loss.dtype == torch.float32
    # Logits of about 3 in bfloat16 are off by 1 %, the divergences of about 0.5 by some 2 %.
    torch.testing.assert_close(found.loss.double(), exact.loss, rtol=0.1, atol=0.0)


def test_weights_in_32_bits_collect_the_gradients_of_states_in_16():
    student, own, teacher, head = states(torch.bfloat16)
    own = own.float().requires_grad_()
    student = student.requires_grad_()
    cakld(student, own, teacher, head, 0.35).loss.backward()
    assert (student.grad.dtype, own.grad.dtype) == (torch.bfloat16, torch.float32)


def test_logits_never_exist_for_more_tokens_than_a_chunk(monkeypatch):
    """Of 600 tokens over 5,000 words; logits of all would be 24 MB of float64."""
    seen, log_softmax = [], torch.Tensor.log_softmax
    monkeypatch.setattr(torch.Tensor, "log_softmax", lambda x, *a: seen.append(x.shape) or log_softmax(x, *a))
    student, own, teacher, head = states(vocabulary=5000, tokens=(6, 100))
    cakld(student.requires_grad_(), own.requires_grad_(), teacher, head, 0.35).loss.backward()
    assert {shape[1] for shape in seen} == {5000}
    assert max(shape[0] for shape in seen) == 2**20 // 5000 < 600
    assert sum(shape[0] for shape in seen) == 2 * 600


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_the_confidence_is_the_mean_probability_of_the_tokens_that_follow(chunk):
    _, _, hidden, head = states()
    ids = torch.randint(37, (3, 5), generator=torch.Generator().manual_seed(1))
    probabilities = (hidden @ head.T).softmax(-1)
    expected = [[probabilities[row, place, ids[row, place + 1]] for place in range(4)] for row in range(3)]
    found = label_probabilities(hidden, head, ids, chunk)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    sure = torch.nn.functional.one_hot(ids[:, 1:], 37).double() * 1000
    alone = torch.cat([sure, torch.zeros(3, 1, 37)], dim=1)
    assert label_probabilities(alone, torch.eye(37, dtype=torch.float64), ids).mean() == 1.0
