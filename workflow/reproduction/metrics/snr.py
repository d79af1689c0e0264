"""End-to-end signal-to-quantization-noise ratio of a network (SpinQuant Sec. B.2, Table 19).

The signal is the logits of the unquantized checkpoint, the noise what the quantized network's differ by; rotation alone
adds none. The text is cut as for perplexity. Neither network is changed.
"""

import torch
from torch import Tensor, nn

from reproduction.metrics.settings import SNR
from rotquant.foundation.progress import track
from rotquant.metrics.perplexity import standard_error
from rotquant.models.limits import metric_windows
from rotquant.tensors.faster import FasterKernels
from rotquant.tensors.quantization import decibel, square_sum
from rotquant.text import Tokens


@torch.no_grad()
def window_snr(model: nn.Module, reference: nn.Module, window: Tensor) -> float:
    """10 log10(sum s^2 / sum (q - s)^2) over a window's tokens and the vocabulary, s and q the networks' logits.

    Args:
        model: the quantized network; its forward returns `.logits` [batch, tokens, vocabulary].
        reference: the unquantized one.
        window: token ids, int64 [tokens].

    Returns:
        In dB: inf for equal logits, nan where one is not a number.
    """
    with FasterKernels():
        exact = reference(input_ids=window[None], use_cache=False).logits.float()
        noise = model(input_ids=window[None], use_cache=False).logits.float().sub_(exact)
    return decibel(square_sum(exact), square_sum(noise)).item()


def end_to_end_snr(model: nn.Module, reference: nn.Module, tokens: Tokens, metric: SNR) -> dict[str, float]:
    """SNR of `model` against `reference`, the mean of `window_snr` over the windows of one text.

    Args:
        model, reference: causal language models with one vocabulary, on one device, in evaluation mode.
        tokens: the whole text that the metric names (`rotquant.text.tokenize`).
        metric: how it is cut into windows.

    Returns:
        `snr`, the mean in dB; `snr_standard_error` of that mean (nan for one window); `windows`, their number.

    Raises:
        CorpusError, RecipeError, CheckpointError: as `rotquant.metrics.perplexity.perplexity`.
    """
    windows = metric_windows(model, tokens, metric)
    device = next(model.parameters()).device
    ratios = torch.tensor(
        [window_snr(model, reference, window.to(device)) for window in track(windows, "SNR", "window")],
        dtype=torch.float64,
    )
    return {"snr": ratios.mean().item(), "snr_standard_error": standard_error(ratios), "windows": len(ratios)}
