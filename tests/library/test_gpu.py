"""On a GPU the library computes what it computes on the CPU: the same rotations, codes and scales."""

import pytest
import torch

from rotquant import api
from rotquant.kernels.hadamard.choice import hadamard_transform, head_hadamard_transform
from rotquant.methods.gptq import GPTQ
from rotquant.methods.gptq.columns import quantize_gptq
from rotquant.models.integrity import tensors_digest
from rotquant.recipes.corpus import CorpusSpec
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.recipes.schemes import QuantizationScheme, RotationScheme, WeightQuantization
from rotquant.tensors.quantization import fake_quantize
from rotquant.weights.hessian import Hessian
from rotquant.weights.packing import all_weight_tensors
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.invariance import invariance_error
from tests.helpers.models import VOCABULARY, tiny_model

pytestmark = pytest.mark.gpu


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [64, 128, 688, 864, 4096, 11008, 14336])
def test_hadamard_transform_agrees_with_the_cpu(size):
    x = random(17, size)
    expected = hadamard_transform(x.double())
    # float32 sums of `size` terms in another order (no TF32): a few units of 2^-24 times sqrt(log2 size).
    assert torch.allclose(hadamard_transform(x.cuda()).cpu().double(), expected, atol=2e-5)
    back = hadamard_transform(hadamard_transform(x.cuda()), inverse=True)
    assert torch.allclose(back.cpu(), x, atol=2e-5)


def test_transform_across_heads_agrees_with_the_cpu():
    x = random(5, 20 * 16)
    result = head_hadamard_transform(x.cuda(), 20).cpu().double()
    assert torch.allclose(result, head_hadamard_transform(x.double(), 20), atol=2e-5)


@pytest.mark.parametrize("granularity", ["tensor", "token", "group"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_fake_quantization_agrees_with_the_cpu(granularity, symmetric):
    group_size = 16 if granularity == "group" else None
    scheme = QuantizationScheme(bits=4, symmetric=symmetric, granularity=granularity, group_size=group_size)
    x = random(33, 64)
    cpu, gpu = fake_quantize(x, scheme), fake_quantize(x.cuda(), scheme).cpu()
    # CUDA divides a tensor by a constant by multiplying with its reciprocal, so scales may differ in the last bit;
    # a value within that of a rounding boundary then gets the neighbouring code: at most 1 of these 2112 values.
    assert (~torch.isclose(cpu, gpu, rtol=1e-6, atol=1e-6)).sum() <= 1


def test_gptq_on_the_second_gpu_gives_the_bits_of_the_first(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tiny_model(hidden_size=64).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    words = (f"w{3 + index % (VOCABULARY - 3)}" for index in range(4000))
    (tmp_path / "words.txt").write_text("\n".join(words))
    recipe = override(preset("quarot"), {"calibration": {"samples": 4, "sequence_length": 16}}, "test")
    text = CorpusSpec(name="words", source="local", path=str(tmp_path / "words.txt"))
    models = [api.quantize(tmp_path / "model", recipe, corpus=text, device=f"cuda:{gpu}") for gpu in (0, 1)]
    digests = [tensors_digest(all_weight_tensors(model.stored.weights)) for model in models]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("group_size", [None, 16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_through_a_cuda_graph_finds_the_codes_of_the_cpu(group_size, symmetric):
    inputs = random(512, 96) @ random(96, 96, seed=1)
    weight = random(40, 96, seed=2)
    granularity = "channel" if group_size is None else "group"
    scheme = QuantizationScheme(bits=4, symmetric=symmetric, granularity=granularity, group_size=group_size)
    settings = WeightQuantization(scheme=scheme)
    results = []
    for device in ("cpu", "cuda"):
        hessian = Hessian(96, device=device, dtype=torch.float64)
        hessian.add(inputs.to(device).double())
        results.append(quantize_gptq(weight.to(device), hessian.matrix, settings, GPTQ(block_size=32)).to("cpu"))
    cpu, gpu = results
    # Float32 sums in another order move a value across a rounding boundary now and then: at most 1 code in 200.
    assert (cpu.codes != gpu.codes).double().mean() < 0.005
    assert torch.allclose(cpu.qparams.scale, gpu.qparams.scale, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "phi3"])
def test_rotation_does_not_change_logits(family):
    model = tiny_model(family).cuda()
    ids = torch.randint(model.config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0)).cuda()
    assert invariance_error(model, RotationScheme(heads=False), seed=0, input_ids=ids, device="cuda") < 1e-4
