"""The flops that the enclave really did, counted from outside, are those that the report lists."""

from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import darknight as dk
from nn.three_ways import SCHEME, fleet_runtime, random

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]

aten = torch.ops.aten

# aten function -> (arguments, result) -> flops of its products, written down from their definitions.
COSTS = {
    aten.mm: lambda a, y: 2 * a[0].shape[0] * a[0].shape[1] * a[1].shape[1],
    aten.addmm: lambda a, y: 2 * a[1].shape[0] * a[1].shape[1] * a[2].shape[1],
    aten.addmm_: lambda a, y: 2 * a[1].shape[0] * a[1].shape[1] * a[2].shape[1],
    aten.bmm: lambda a, y: 2 * prod(a[0].shape) * a[1].shape[2],
    aten.baddbmm: lambda a, y: 2 * prod(a[1].shape) * a[2].shape[2],
    aten.addbmm: lambda a, y: 2 * prod(a[1].shape) * a[2].shape[2],
    aten.mv: lambda a, y: 2 * prod(a[0].shape),
    aten.addmv: lambda a, y: 2 * prod(a[1].shape),
    aten.dot: lambda a, y: 2 * a[0].shape[0],
    aten.vdot: lambda a, y: 2 * a[0].shape[0],
    # out (example, channel, *place), every value a sum over a kernel; transposed: every input value spread by one
    aten.convolution: lambda a, y: (
        2 * prod(a[0].shape) * prod(a[1].shape[1:]) if a[6] else 2 * prod(y.shape) * prod(a[1].shape[1:])
    ),
    aten.conv_tbc: lambda a, y: 2 * prod(y.shape) * a[1].shape[0] * a[1].shape[1],
    # query (*, target, width): scores over width, then values over source
    aten._scaled_dot_product_flash_attention_for_cpu: lambda a, y: (
        4 * prod(a[0].shape[:2]) * a[0].shape[2] * a[1].shape[2] * a[0].shape[3]
    ),
    # x (time, example, in), gates x in, gates x hidden
    aten.mkldnn_rnn_layer: lambda a, y: 2 * prod(a[0].shape[:2]) * (prod(a[1].shape) + prod(a[2].shape)),
    # x1 (b, _, i, _), w (_, o, i, j), x2: first over i, then over j
    aten._trilinear: lambda a, y: 2 * a[0].shape[0] * a[1].shape[0] * a[1].shape[2] * (a[1].shape[1] + 1),
    aten._euclidean_dist: lambda a, y: 2 * prod(y.shape) * (a[0].shape[-1] + 2),
}


class Observer(TorchDispatchMode):
    """Counts the products of this thread, except while `paused`."""

    def __init__(self):
        super().__init__()
        self.flops = 0
        self.paused = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        cost = COSTS.get(func._overloadpacket)
        if cost is None and not self.paused:
            with self:  # inference mode shows functions whole
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        result = func(*args, **(kwargs or {}))
        if cost is not None and not self.paused:
            self.flops += cost(args, result)
        return result


@pytest.fixture
def observer(monkeypatch):
    """Looks away while the runtime masks, checks and unmasks."""
    found = Observer()

    def pausing(method):
        def wrapper(*args, **kwargs):
            found.paused += 1
            try:
                return method(*args, **kwargs)
            finally:
                found.paused -= 1

        return wrapper

    monkeypatch.setattr(dk.Runtime, "forward", pausing(dk.Runtime.forward))
    monkeypatch.setattr(dk.Runtime, "backward", pausing(dk.Runtime.backward))
    return found


class Module(nn.Module):
    """A module that calls `function(self, x)`, with parameters of these shapes."""

    def __init__(self, function, *children, **shapes):
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(children)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(*shape)))

    def forward(self, x):
        return self.function(self, x)


def encoder():
    return nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)


# model, shape of the input, flops in the enclave, flops on masked shares
CASES = {
    "layers": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 7)),
        (3, 2, 5, 5),
        0,
        2 * 3 * (9 * 4 * 2 * 9 + 36 * 7),
    ),
    "groups and transposes": (
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.ConvTranspose1d(6, 4, 2, stride=2, groups=2)),
        (3, 4, 7),
        0,
        2 * 3 * (5 * 6 * 2 * 3) + 2 * 3 * (5 * 6 * 2 * 2),
    ),
    "sequences": (lambda: nn.Linear(5, 7), (3, 4, 5), 0, 2 * 12 * 35),
    "LSTM": (lambda: nn.LSTM(5, 4), (3, 2, 5), 2 * 6 * 16 * (5 + 4), 0),
    "LSTM, two layers, both ways": (
        lambda: nn.LSTM(5, 4, num_layers=2, bidirectional=True),
        (3, 2, 5),
        2 * 6 * 2 * 16 * ((5 + 4) + (8 + 4)),
        0,
    ),
    "LSTM with projections": (
        lambda: nn.LSTM(5, 4, proj_size=3),
        (3, 2, 5),
        2 * 6 * (16 * (5 + 3) + 4 * 3),
        0,
    ),
    "GRU": (lambda: nn.GRU(5, 4, batch_first=True), (2, 3, 5), 2 * 6 * 12 * (5 + 4), 0),
    "LSTM cell": (lambda: nn.LSTMCell(5, 4), (3, 5), 2 * 3 * 16 * (5 + 4), 0),
    "attention": (
        lambda: Module(
            lambda self, x: self.parts[0](x, x, x, need_weights=False)[0],
            nn.MultiheadAttention(6, 2, batch_first=True),
        ),
        (3, 4, 6),
        4 * 3 * 2 * 4 * 4 * 3,
        2 * 12 * (6 * 18 + 6 * 6),
    ),
    "attention with weights": (
        lambda: Module(lambda self, x: self.parts[0](x, x, x)[0], nn.MultiheadAttention(6, 2)),
        (3, 4, 6),
        4 * 4 * 2 * 3 * 3 * 3,
        2 * 12 * (6 * 18 + 6 * 6),
    ),
    "transformer": (encoder, (3, 4, 6), 4 * 3 * 2 * 4 * 4 * 3, 2 * 12 * (6 * 18 + 6 * 6 + 2 * 6 * 8)),
    "own parameter": (lambda: Module(lambda self, x: F.linear(x, self.w), w=(4, 5)), (3, 5), 0, 2 * 3 * 20),
    "computed weight": (
        lambda: Module(lambda self, x: F.linear(x, self.parts[0](x)), nn.Linear(5, 5)),
        (3, 5),
        2 * 3 * 5 * 3,
        2 * 3 * 25,
    ),
    "bilinear": (
        lambda: Module(lambda self, x: self.parts[0](x, x), nn.Bilinear(5, 5, 4)),
        (3, 5),
        2 * 3 * 4 * 5 * 6,
        0,
    ),
    "matmul": (lambda: Module(lambda self, x: x @ self.w, w=(5, 4)), (3, 5), 2 * 3 * 5 * 4, 0),
    "addmm in place": (
        lambda: Module(lambda self, x: torch.zeros(3, 4).addmm_(x, self.w), w=(5, 4)),
        (3, 5),
        2 * 3 * 5 * 4,
        0,
    ),
    "einsum": (lambda: Module(lambda self, x: torch.einsum("bi,oi->bo", x, self.w), w=(4, 5)), (3, 5), 120, 0),
    "bmm": (lambda: Module(lambda self, x: torch.bmm(x, x.mT), w=(1,)), (3, 4, 5), 2 * 3 * 4 * 5 * 4, 0),
    "addbmm": (lambda: Module(lambda self, x: torch.addbmm(self.w, x, x.mT), w=(4, 4)), (3, 4, 5), 480, 0),
    "conv_tbc": (
        lambda: Module(lambda self, x: torch.conv_tbc(x, self.w, self.b), w=(3, 5, 4), b=(4,)),
        (6, 2, 5),
        2 * 4 * 2 * 3 * 5 * 4,
        0,
    ),
    "distances": (
        lambda: Module(lambda self, x: torch.cdist(x[:2], x[:2]).sum() + torch.cdist(x, x), w=(1,)),
        (30, 5),
        2 * 900 * 7,
        0,
    ),
    "excluded": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), (3, 5), 2 * 3 * 12, 2 * 3 * 20),
}


def counted(observer, case, mode, calls=2):
    """The report and the observed flops per call."""
    build, shape, *_ = CASES[case]
    model, x = build(), random(*shape)
    model.train(mode is torch.enable_grad)
    where = (lambda name, module: name != "1") if case == "excluded" else None
    with fleet_runtime() as runtime:
        report = dk.protect_(model, runtime, where=where)
        with mode(), observer:
            for _ in range(calls):  # the first time it is measured, the second remembered
                model(x)
    return report, observer.flops // calls


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("case", CASES)
def test_the_report_lists_exactly_what_the_enclave_did(observer, case, mode):
    report, observed = counted(observer, case, mode)
    expected = CASES[case][2]
    assert observed == expected
    assert sum(row.flops for row in report.enclave) == 2 * expected


@pytest.mark.parametrize("case", CASES)
def test_the_masked_flops_are_those_of_the_plain_layers(observer, case):
    report, in_enclave = counted(observer, case, torch.enable_grad)
    assert sum(row.flops for row in report.masked) == 2 * CASES[case][3]
    plain = Observer()
    with plain:
        CASES[case][0]()(random(*CASES[case][1]))
    assert plain.flops == CASES[case][3] + in_enclave


def test_the_observer_sees_what_a_plain_model_does():
    with Observer() as observer:
        nn.Linear(5, 4)(random(3, 5))
    assert observer.flops == 2 * 3 * 20


def test_every_product_in_the_enclave_has_a_reason(observer):
    for case in CASES:
        report, _ = counted(observer, case, torch.no_grad, calls=1)
        assert all(row.why for row in report.enclave), case
        assert not any(row.why for row in report.masked), case


def test_an_empty_batch_first_hides_no_later_product():
    model = Module(lambda self, x: torch.bmm(x, x.mT), w=(1,))
    with dk.Runtime(SCHEME, None) as runtime:
        report = dk.protect_(model, runtime)
        model(torch.empty(0, 4, 5))
        model(random(3, 4, 5))
    assert sum(row.flops for row in report.enclave) == 2 * 3 * 4 * 5 * 4


def test_a_part_without_parameters_is_seen_when_it_is_called_by_itself():
    model = nn.Sequential(nn.Linear(5, 5), Module(lambda self, x: x @ x.mT))
    with dk.Runtime(SCHEME, None) as runtime:
        report = dk.protect_(model, runtime)
        model[1](random(3, 5))
    assert [(row.name, row.flops) for row in report.enclave if row.calls] == [("1", 2 * 3 * 5 * 3)]


def test_a_part_called_by_itself_is_masked_under_its_own_name():
    model = nn.ModuleDict(
        {"inner": nn.Sequential(nn.Linear(5, 4), Module(lambda self, x: F.linear(x, self.w), w=(3, 4)))}
    )
    with dk.Runtime(SCHEME, None) as runtime:
        report = dk.protect_(model, runtime)
        model["inner"](random(2, 5))
        model["inner"][1](random(2, 4))
    assert [(row.name, row.calls) for row in report.masked] == [("inner.0", 1), ("inner.1.w", 2)]


def test_the_report_prints_a_line_for_each_row_and_the_share(observer):
    report, _ = counted(observer, "transformer", torch.no_grad, calls=1)
    lines = str(report).splitlines()
    assert len(lines) == 1 + len(report.rows) + 1
    assert lines[-1].endswith("of the forward products so far were computed on masked shares")
