"""Which operators run on a virtual GPU: python operator_probe.py GPU.

The last line is a JSON object of what went wrong, by operator; each is run forward, and backward where there is one.
"""

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

from stalloc.device import activate, find_gpu

activate("virtual", find_gpu(sys.argv[1]))
import torch  # noqa: E402  (the device is in place)
import torch.nn.functional as F  # noqa: E402

try:
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:  # before torch 2.3 attention's backends are chosen otherwise
    sdpa_kernel = None

warnings.simplefilter("ignore")
OPERATORS: dict[str, Callable[[], Any]] = {}


def operator(function: Callable[[], Any]) -> Callable[[], Any]:
    """Add a function to those that are probed, under its name."""
    OPERATORS[function.__name__.replace("_", " ").strip()] = function
    return function


def numbers(*shape: int, **options: Any) -> torch.Tensor:
    """Floating-point numbers that want a gradient."""
    return torch.randn(*shape, device="cuda", requires_grad=True, **options)


def tokens(*shape: int) -> torch.Tensor:
    """Numbers of tokens, uploaded from the host."""
    return torch.randint(0, 1000, shape).cuda()


@operator
def embedding() -> None:
    F.embedding(tokens(32, 256), numbers(1000, 64)).sum().backward()


@operator
def indexing() -> None:
    weight = numbers(1000, 64)
    (weight[tokens(32, 256)].sum() + weight[tokens(7), :].sum()).backward()


@operator
def gather_and_scatter() -> None:
    numbers(32, 16, 1000).gather(-1, tokens(32, 16, 1)).mean().backward()
    torch.zeros(1000, device="cuda").scatter_add_(0, tokens(512), torch.ones(512, device="cuda"))


@operator
def index_put_with_accumulation() -> None:
    ones = torch.ones(512, 8, device="cuda")
    torch.zeros(1000, 8, device="cuda").index_put_((tokens(512),), ones, accumulate=True)


@operator
def sort() -> None:
    torch.sort(numbers(8192).detach())
    torch.sort(numbers(64, 4096).detach(), dim=-1, stable=True)
    torch.sort(tokens(1 << 20))


@operator
def topk() -> None:
    torch.topk(numbers(64, 10_000), 5)[0].sum().backward()
    torch.kthvalue(numbers(64, 1000), 5)


@operator
def unique_and_nonzero() -> None:
    torch.unique(tokens(4096), return_inverse=True, return_counts=True)
    torch.unique_consecutive(tokens(4096))
    torch.nonzero(tokens(4096))
    torch.masked_select(tokens(4096), tokens(4096) > 3)


@operator
def cumulative_sums() -> None:
    torch.cumsum(numbers(1 << 20), 0).sum().backward()
    torch.cumsum(tokens(64, 64), 1)
    torch.logcumsumexp(numbers(1 << 12), 0)
    torch.cummax(tokens(1 << 12), 0)


@operator
def counting() -> None:
    torch.histc(torch.randn(1000, device="cuda"))
    torch.bincount(tokens(4096))
    torch.searchsorted(torch.arange(1000, device="cuda"), tokens(64))


@operator
def sampling() -> None:
    torch.multinomial(torch.rand(4, 1000, device="cuda"), 2)
    torch.randperm(100_000, device="cuda")
    torch.bernoulli(torch.rand(1000, device="cuda"))
    F.gumbel_softmax(numbers(4, 1000)).sum().backward()


@operator
def reductions() -> None:
    x = numbers(1 << 20)
    (x.sum() + x.var() + x.norm() + x.amax() + torch.logsumexp(x, 0)).backward()
    torch.median(x.detach())


@operator
def matrix_products() -> None:
    a, b = numbers(4, 64, 64, dtype=torch.bfloat16), numbers(4, 64, 64, dtype=torch.bfloat16)
    torch.baddbmm(a, a, b).sum().backward()
    F.linear(numbers(64, 256), numbers(256, 256), numbers(256)).sum().backward()
    torch.einsum("bij,bjk->bik", a, b)


@operator
def int8_product() -> None:
    torch._int_mm(  # what quantisation libraries call
        torch.ones(32, 64, dtype=torch.int8, device="cuda"), torch.ones(64, 32, dtype=torch.int8, device="cuda")
    )


@operator
def convolutions() -> None:
    F.conv1d(numbers(2, 4, 64), numbers(8, 4, 3)).sum().backward()
    F.conv2d(numbers(2, 4, 32, 32), numbers(8, 4, 3, 3), numbers(8), padding=1).sum().backward()
    F.conv3d(numbers(2, 4, 8, 8, 8), numbers(8, 4, 3, 3, 3)).sum().backward()
    F.conv2d(numbers(2, 8, 32, 32), numbers(8, 1, 3, 3), groups=8).sum().backward()
    half = numbers(2, 8, 32, 32, dtype=torch.float16).to(memory_format=torch.channels_last)
    F.conv2d(half, numbers(8, 8, 3, 3, dtype=torch.float16), stride=2).sum().backward()


@operator
def transposed_convolutions() -> None:
    F.conv_transpose2d(numbers(2, 8, 16, 16), numbers(8, 4, 2, 2), stride=2).sum().backward()
    F.conv_transpose1d(numbers(2, 8, 16), numbers(8, 4, 2), stride=2).sum().backward()


@operator
def normalisations() -> None:
    x = numbers(2, 8, 16, 16)
    for norm in (torch.nn.BatchNorm2d(8), torch.nn.GroupNorm(2, 8), torch.nn.InstanceNorm2d(8)):
        norm.cuda()(x).sum().backward()
    F.layer_norm(numbers(8, 64), (64,), numbers(64), numbers(64)).sum().backward()


@operator
def pooling_and_resizing() -> None:
    x = numbers(2, 8, 16, 16)
    (F.max_pool2d(x, 2).sum() + F.adaptive_avg_pool2d(x, 1).sum() + F.interpolate(x, scale_factor=2).sum()).backward()
    F.grid_sample(x, numbers(2, 4, 4, 2), align_corners=False).sum().backward()


@operator
def recurrent_networks() -> None:
    for kind in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
        net = kind(32, 64, num_layers=2, bidirectional=True, dropout=0.5).cuda()
        net(numbers(5, 3, 32))[0].sum().backward()
    packed = torch.nn.utils.rnn.pack_padded_sequence(numbers(5, 3, 32), torch.tensor([5, 4, 2]))
    torch.nn.LSTM(32, 64).cuda()(packed)[0].data.sum().backward()
    torch.nn.LSTMCell(32, 64).cuda()(numbers(3, 32))[0].sum().backward()


def attend(backend: str, dtype: torch.dtype) -> None:
    """Attention by one backend, forward and backward; nothing where torch has none of that name."""
    q, k, v = (numbers(2, 8, 128, 64, dtype=dtype) for _ in range(3))
    if sdpa_kernel is None:
        names = {
            "MATH": "enable_math",
            "EFFICIENT_ATTENTION": "enable_mem_efficient",
            "FLASH_ATTENTION": "enable_flash",
        }
        if backend not in names:
            return
        only = torch.backends.cuda.sdp_kernel(**{option: name == backend for name, option in names.items()})
    elif not hasattr(SDPBackend, backend):
        return
    else:
        only = sdpa_kernel(getattr(SDPBackend, backend))
    with only:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()


@operator
def attention_of_torchs_choice() -> None:
    q = numbers(2, 8, 128, 64, dtype=torch.bfloat16)
    F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True).cuda()
    layer(numbers(2, 16, 64)).sum().backward()


@operator
def attention_by_mathematics() -> None:
    attend("MATH", torch.float32)


@operator
def attention_that_saves_memory() -> None:
    attend("EFFICIENT_ATTENTION", torch.float32)


@operator
def flash_attention() -> None:
    if torch.cuda.get_device_capability() >= (8, 0):  # others have none
        attend("FLASH_ATTENTION", torch.bfloat16)


@operator
def cudnn_attention() -> None:
    if torch.cuda.get_device_capability() >= (8, 0):
        attend("CUDNN_ATTENTION", torch.bfloat16)


@operator
def losses() -> None:
    F.cross_entropy(numbers(64, 1000), tokens(64)).backward()
    F.nll_loss(numbers(2, 5, 8, 8), tokens(2, 8, 8).clamp(0, 4)).backward()
    logits, targets = numbers(50, 4, 20), torch.ones(4, 10, dtype=torch.long, device="cuda")
    lengths = torch.full((4,), 50), torch.full((4,), 10)
    F.ctc_loss(logits.log_softmax(2), targets, *lengths).backward()


@operator
def embedding_bags() -> None:
    F.embedding_bag(tokens(4096), numbers(1000, 16), torch.arange(0, 4096, 64).cuda()).sum().backward()


@operator
def linear_algebra() -> None:
    a = torch.randn(16, 16, device="cuda")
    for function in (torch.linalg.svd, torch.linalg.inv, torch.linalg.qr, torch.linalg.eigh, torch.linalg.slogdet):
        function(a)
    torch.linalg.solve(a, a)
    torch.linalg.lstsq(a, a)
    torch.linalg.cholesky_ex(a)


@operator
def fourier_transforms() -> None:
    torch.fft.ifft2(torch.fft.fft2(numbers(64, 64))).abs().sum().backward()
    torch.stft(torch.randn(4096, device="cuda"), 256, return_complex=True, window=torch.hann_window(256).cuda())


@operator
def sparse_tensors() -> None:
    sparse = torch.eye(16, device="cuda").to_sparse()
    torch.sparse.mm(sparse, torch.randn(16, 16, device="cuda"))
    sparse.coalesce()
    torch.eye(16, device="cuda").to_sparse_csr() @ torch.randn(16, 16, device="cuda")


@operator
def nested_tensors() -> None:
    torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], device="cuda").to_padded_tensor(0.0)


@operator
def optimizers() -> None:
    for kind in ("AdamW", "SGD", "Adagrad", "RMSprop", "Adafactor"):
        weight = numbers(64, 64)
        weight.sum().backward()
        if hasattr(torch.optim, kind):  # Adafactor is young
            getattr(torch.optim, kind)([weight], lr=0.1).step()
    weight = numbers(64, 64)
    weight.sum().backward()
    torch.optim.AdamW([weight], fused=True).step()
    scaler = torch.cuda.amp.GradScaler() if not hasattr(torch.amp, "GradScaler") else torch.amp.GradScaler("cuda")
    scaler.scale(weight.sum()).backward()
    scaler.step(torch.optim.SGD([weight], lr=0.1))
    scaler.update()


@operator
def small_floats() -> None:
    numbers(64, 64).detach().to(torch.float8_e4m3fn).to(torch.bfloat16)
    fakes = torch.fake_quantize_per_tensor_affine(numbers(64), 0.1, 0, -128, 127)
    fakes.sum().backward()


@operator
def complex_numbers() -> None:
    z = torch.randn(64, 64, dtype=torch.complex64, device="cuda", requires_grad=True)
    (z @ z).abs().sum().backward()


wrong: dict[str, str] = {}
for name, function in OPERATORS.items():
    try:
        function()
        torch.cuda.synchronize()
    except Exception as error:
        wrong[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
print(f"{len(OPERATORS)} operators")
print(json.dumps(wrong))
