"""Models from descriptions: every layer type trains on shares, and a stranger's description is built or refused."""

import ast
import copy
import inspect
import json
import math
import random
import re
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import darknight as dk
from darknight.errors import UsageError
from darknight.models import LAYERS, Limits, build_described, check_description, described, layer_arguments, layer_types

SHAPE, CLASSES = (3, 8, 6), 5
SCHEME = dk.Scheme(inputs=2, colluders=1)
PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def layer(kind, **arguments):
    return {"type": kind, **arguments}


def conv(channels, out, **arguments):
    return layer("Conv2d", in_channels=channels, out_channels=out, kernel_size=3, padding=1, **arguments)


def head(features):
    return [layer("Flatten"), layer("Linear", in_features=features, out_features=CLASSES)]


def small():
    """A convolution, a residual block with a shortcut, pooling, a head."""
    block = layer(
        "Residual",
        layers=[conv(4, 6, bias=False), layer("BatchNorm2d", num_features=6), layer("ReLU")],
        shortcut=[layer("Conv2d", in_channels=4, out_channels=6, kernel_size=1)],
    )
    return {"layers": [conv(3, 4), block, layer("Sequential", layers=[layer("AvgPool2d", kernel_size=2)]), *head(72)]}


def build(layers, shape=SHAPE, seed=0, **options):
    return build_described({"layers": layers}, shape=shape, classes=CLASSES, seed=seed, **options)


def images(count, shape=SHAPE):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(count))


# One of each kind: the shape of an example, the layer with arguments of every sort, and the numbers that it makes.
LINE, IMAGE, BLOCK = (3, 12), SHAPE, (2, 4, 6, 5)
SAMPLES = {
    "Conv1d": (LINE, {"in_channels": 3, "out_channels": 6, "kernel_size": 3, "stride": 2, "groups": 3}, 30),
    "Conv2d": (IMAGE, {"in_channels": 3, "out_channels": 4, "kernel_size": [3, 1], "padding": "same"}, 192),
    "Conv3d": (BLOCK, {"in_channels": 2, "out_channels": 2, "kernel_size": 2, "padding": [1, 0, 0]}, 200),
    "ConvTranspose1d": (LINE, {"in_channels": 3, "out_channels": 2, "kernel_size": 3, "stride": 2}, 50),
    "ConvTranspose2d": (
        IMAGE,
        {"in_channels": 3, "out_channels": 2, "kernel_size": 2, "stride": 2, "output_padding": [1, 0]},
        2 * 17 * 12,
    ),
    "ConvTranspose3d": (BLOCK, {"in_channels": 2, "out_channels": 1, "kernel_size": 2, "bias": False}, 210),
    "Linear": (LINE, {"in_features": 12, "out_features": 7, "bias": False}, 21),
    "BatchNorm1d": (LINE, {"num_features": 3, "eps": 1e-3, "momentum": 0.5}, 36),
    "BatchNorm2d": (IMAGE, {"num_features": 3, "affine": False}, 144),
    "BatchNorm3d": (BLOCK, {"num_features": 2}, 240),
    "LayerNorm": (IMAGE, {"normalized_shape": [8, 6], "elementwise_affine": True, "bias": False}, 144),
    "GroupNorm": (IMAGE, {"num_groups": 3, "num_channels": 3, "eps": 1e-4}, 144),
    "ReLU": (IMAGE, {}, 144),
    "ReLU6": (IMAGE, {}, 144),
    "LeakyReLU": (IMAGE, {"negative_slope": 0.1}, 144),
    "ELU": (IMAGE, {"alpha": 2}, 144),
    "GELU": (IMAGE, {"approximate": "tanh"}, 144),
    "SiLU": (IMAGE, {}, 144),
    "Hardswish": (IMAGE, {}, 144),
    "Sigmoid": (IMAGE, {}, 144),
    "Tanh": (IMAGE, {}, 144),
    "MaxPool1d": (LINE, {"kernel_size": 3, "stride": 2, "padding": 1}, 18),
    "MaxPool2d": (IMAGE, {"kernel_size": [2, 3], "dilation": 1, "ceil_mode": True}, 24),
    "MaxPool3d": (BLOCK, {"kernel_size": 2}, 24),
    "AvgPool1d": (LINE, {"kernel_size": 4}, 9),
    "AvgPool2d": (IMAGE, {"kernel_size": 3, "stride": [2, 1], "padding": 1, "count_include_pad": False}, 72),
    "AvgPool3d": (BLOCK, {"kernel_size": [2, 2, 1]}, 60),
    "AdaptiveAvgPool1d": (LINE, {"output_size": 5}, 15),
    "AdaptiveAvgPool2d": (IMAGE, {"output_size": [2, 1]}, 6),
    "AdaptiveAvgPool3d": (BLOCK, {"output_size": 2}, 16),
    "Flatten": (IMAGE, {"start_dim": 2, "end_dim": -1}, 144),
    "Dropout": (IMAGE, {"p": 0.25}, 144),
    "Dropout2d": (IMAGE, {"p": 0}, 144),
    "Sequential": (IMAGE, {"layers": [conv(3, 2), layer("ReLU")]}, 96),
    "Residual": (IMAGE, {"layers": [layer("Sequential", layers=[conv(3, 3)]), layer("Tanh")]}, 144),
}


def test_every_type_has_a_sample():
    assert SAMPLES.keys() == LAYERS.keys()


def test_the_howto_names_every_type():
    page = Path(__file__).resolve().parents[2] / "docs" / "howto" / "train-on-your-data.md"
    named = set(re.findall(r"\w+", page.read_text()))
    assert {kind if kind in named else re.sub("[123]d$", "", kind) for kind in LAYERS} <= named


def depthwise(module) -> bool:
    """Such layers stay in the enclave, where they are cheaper."""
    return getattr(module, "groups", 1) > 1 and module.groups == module.in_channels


@pytest.mark.parametrize("kind", LAYERS)
def test_every_type_trains_a_step_on_shares(kind):
    shape, arguments, made = SAMPLES[kind]
    model = build([layer(kind, **arguments), *head(made)], shape=shape)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dk.Runtime(SCHEME, None, seed=0) as runtime:
        report = dk.protect_(model, runtime)
        cross_entropy(model(images(4, shape)), torch.arange(4) % CLASSES).backward()
        optimizer.step()
        dk.unprotect_(model)
    named = dict(model.named_modules())
    products = {name for name, module in named.items() if isinstance(module, PRODUCTS) and not depthwise(module)}
    assert {row.name for row in report.masked} == products
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    with torch.no_grad():
        assert model.eval()(images(3, shape)).shape == (3, CLASSES)


# --- what is built ----------------------------------------------------------------------------------------------------
def test_names_in_the_state_dict_are_those_of_the_description():
    assert list(build_described(small(), shape=SHAPE, classes=CLASSES, seed=0).state_dict()) == [
        *("0.weight", "0.bias", "1.layers.0.weight"),
        *(f"1.layers.1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")),
        *("1.shortcut.0.weight", "1.shortcut.0.bias", "4.weight", "4.bias"),
    ]


def test_it_computes_what_the_layers_compute():
    model = build_described(small(), shape=SHAPE, classes=CLASSES, seed=1).eval()
    own = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1))
    inner = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU()).eval()
    shortcut, last = nn.Conv2d(4, 6, 1), nn.Linear(72, CLASSES)
    for module, name in ((own, ""), (inner, "1.layers."), (shortcut, "1.shortcut.0."), (last, "4.")):
        given = {key.removeprefix(name): value for key, value in model.state_dict().items() if key.startswith(name)}
        module.load_state_dict({key: given[key] for key in module.state_dict()})
    x = images(7)
    between = own(x)
    expected = last(nn.functional.avg_pool2d(inner(between) + shortcut(between), 2).flatten(1))
    assert torch.equal(model(x), expected)


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    one, same, other = (
        build_described(small(), shape=SHAPE, classes=CLASSES, seed=seed).state_dict() for seed in (1, 1, 2)
    )
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["0.weight"], other["0.weight"])


def test_a_description_comes_back_in_plain_values():
    given = small()
    given["layers"][0]["kernel_size"] = (3, 3)
    found = check_description(given, shape=SHAPE, classes=CLASSES)
    assert found["layers"][0]["kernel_size"] == [3, 3]
    assert found == json.loads(json.dumps(found))
    assert check_description(found, shape=SHAPE, classes=CLASSES) == found
    assert found["layers"] is not given["layers"]


def test_rows_of_a_table():
    model = build([layer("Linear", in_features=9, out_features=4), layer("GELU"), *head(4)], shape=(9,))
    assert model(torch.zeros(3, 9)).shape == (3, CLASSES)


# --- what is refused --------------------------------------------------------------------------------------------------
def edited(change):
    description = small()
    change(description)
    return description


WIDE = layer("Linear", in_features=1 << 14, out_features=1 << 14)
REFUSED = {
    "no object": (list, 'not {"layers": [...]} alone'),
    "more than layers": (lambda: {**small(), "code": "import os"}, 'not {"layers": [...]} alone'),
    "no list": (lambda: {"layers": "Linear"}, "not a list of layers"),
    "no layers": (lambda: {"layers": []}, "not a list of layers"),
    "no layer": (
        lambda: edited(lambda d: d["layers"].insert(1, "ReLU")),
        "layer 1: 'ReLU'; needs a type, one of Conv1d",
    ),
    "no type": (lambda: edited(lambda d: d["layers"][0].pop("type")), "layer 0: type None; needs a type, one of"),
    "unknown type": (
        lambda: edited(lambda d: d["layers"][1]["layers"][2].update(type="Embedding")),
        "layer 1.layers.2: type 'Embedding'; needs a type, one of Conv1d, Conv2d,",
    ),
    "a name of torch": (lambda: {"layers": [layer("modules.linear.Linear")]}, "needs a type, one of"),
    "unknown argument": (
        lambda: edited(lambda d: d["layers"][1]["shortcut"][0].update(device="cuda")),
        "layer 1.shortcut.0 (Conv2d): unknown argument 'device'; known are in_channels, out_channels, kernel_size,",
    ),
    "none known": (lambda: {"layers": [layer("ReLU", inplace=True)]}, "unknown argument 'inplace'; it has none"),
    "missing argument": (
        lambda: edited(lambda d: d["layers"][0].pop("kernel_size")),
        "layer 0 (Conv2d): no kernel_size; needs a whole number from 1 to 1024, or a list of 2 such",
    ),
    "out of range": (
        lambda: edited(lambda d: d["layers"][0].update(kernel_size=0)),
        "layer 0 (Conv2d): kernel_size 0;",
    ),
    "no number": (lambda: edited(lambda d: d["layers"][0].update(stride=True)), "stride True; needs a whole number"),
    "no whole number": (lambda: edited(lambda d: d["layers"][0].update(stride=1.0)), "stride 1.0; needs a whole"),
    "too many axes": (lambda: edited(lambda d: d["layers"][0].update(stride=[1, 1, 1])), "stride of kind list; needs"),
    "a huge number": (
        lambda: edited(lambda d: d["layers"][0].update(stride=10**5000)),
        "stride a number of more digits than fit here",
    ),
    "not finite": (lambda: {"layers": [layer("Dropout", p=float("nan")), *head(144)]}, "p nan; needs a number from 0"),
    "too large a number": (lambda: {"layers": [layer("Dropout", p=10**400), *head(144)]}, "needs a number from 0 to"),
    "another word": (lambda: edited(lambda d: d["layers"][0].update(padding="full")), "or one of same, valid"),
    "do not go together": (
        lambda: edited(lambda d: d["layers"][0].update(groups=2)),
        "layer 0 (Conv2d): in_channels must be divisible by groups",
    ),
    "without its batch": (
        lambda: {"layers": [layer("Flatten", start_dim=2), conv(2, 5)]},
        "layer 1 (Conv2d): an input of (3, 48) an example; needs 3 numbers, channels and 2 more",
    ),
    "other channels": (
        lambda: edited(lambda d: d["layers"][0].update(in_channels=1)),
        "layer 0 (Conv2d): an input with 3 channels; its in_channels is 1",
    ),
    "output padding": (
        lambda: {"layers": [layer("ConvTranspose2d", in_channels=3, out_channels=1, kernel_size=2, output_padding=1)]},
        "layer 0 (ConvTranspose2d): output_padding must be smaller",
    ),
    "shapes do not fit": (lambda: edited(lambda d: d["layers"][4].update(in_features=71)), "layer 4 (Linear): "),
    "inside a block": (
        lambda: edited(lambda d: d["layers"][1]["layers"][1].update(num_features=7)),
        "layer 1.layers.1 (BatchNorm2d): ",
    ),
    "a sum of two shapes": (
        lambda: edited(lambda d: d["layers"][1].pop("shortcut")),
        "layer 1 (Residual): its layers make (6, 8, 6) of an example, and its shortcut (4, 8, 6)",
    ),
    "other classes": (
        lambda: edited(lambda d: d["layers"][4].update(out_features=6)),
        "the layers make (2, 6) of 2 examples of (3, 8, 6); needs (2, 5)",
    ),
    "no flat output": (lambda: {"layers": [conv(3, 5)]}, "the layers make (2, 5, 8, 6) of 2 examples"),
    "nothing to train": (lambda: {"layers": [layer("Flatten")]}, "without a layer that can be trained"),
    "too many layers": (lambda: {"layers": [layer("ReLU")] * 1025}, "more than 1024 layers"),
    "too many parameters": (lambda: {"layers": [WIDE] * 1000}, "with 268451840000 parameters; at most 268435456"),
    "too many for 64 bits": (
        lambda: {"layers": [layer("Conv3d", in_channels=1 << 16, out_channels=1 << 16, kernel_size=1024)]},
        "layer 0 (Conv3d): ",
    ),
    "too many values": (
        lambda: {"layers": [layer("Conv2d", in_channels=3, out_channels=256, kernel_size=1, padding=1000)]},
        "layer 0 (Conv2d): with this one, 1031180288 numbers are made of an example; at most 134217728 may be",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    make, complaint = REFUSED[case]
    with pytest.raises(UsageError) as refusal:
        build_described(make(), shape=SHAPE, classes=CLASSES, seed=0)
    assert complaint in str(refusal.value)
    assert len(str(refusal.value)) < 800


def test_layers_inside_layers_have_a_limit():
    def nested(depth):
        inner = layer("ReLU")
        for _ in range(depth - 1):
            inner = layer("Sequential", layers=[inner])
        return [inner, *head(144)]

    build(nested(8))
    with pytest.raises(UsageError, match="deeper than 8"):
        build(nested(9))
    endless = layer("Sequential", layers=[])
    endless["layers"].append(endless)
    with pytest.raises(UsageError, match="deeper than 8"):
        build([endless])


@pytest.mark.parametrize(
    ("shape", "classes"), [((), 5), ((0, 8), 5), ((1, 2, 3, 4, 5), 5), ((3, 8), 0), ((3, True), 5)]
)
def test_a_task_that_makes_no_sense_is_refused(shape, classes):
    with pytest.raises(UsageError, match="whole numbers from 1"):
        check_description(small(), shape=shape, classes=classes)


def test_a_network_that_takes_examples_for_features_is_refused(monkeypatch):
    """Two batch sizes find it out, one does not."""
    mistaken = [layer("LayerNorm", normalized_shape=[2, 9]), *head(9)]
    with pytest.raises(UsageError, match=r"layer 0 \(LayerNorm\)"):
        build(mistaken, shape=(9,))
    monkeypatch.setattr(described, "_TRIALS", ((2, True),))
    build(mistaken, shape=(9,))


def test_the_meta_device_alone_would_let_too_much_pass(monkeypatch):
    """Without our look at its input, a layer is accepted that torch then refuses to compute."""
    wrong = [layer("ConvTranspose1d", in_channels=1, out_channels=1, kernel_size=1), *head(12)]
    with pytest.raises(UsageError, match="3 channels; its in_channels is 1"):
        build(wrong, shape=LINE)
    monkeypatch.setattr(described._Node, "check_input", lambda node, shape: None)
    model = build(wrong, shape=LINE)
    with pytest.raises(RuntimeError, match="channels"):
        model(images(2, LINE))


# --- strangers --------------------------------------------------------------------------------------------------------
BANNED = {"eval", "exec", "getattr", "__import__", "import_module", "importlib", "pickle", "globals", "vars", "compile"}


def names_in(source):
    tree = ast.parse(source)
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    found |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return found | {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}


def test_no_name_of_a_stranger_is_looked_up():
    for module in (described, layer_types, layer_arguments):
        assert not names_in(inspect.getsource(module)) & BANNED
    assert names_in("import pickle\nmade = getattr(nn, kind)()") & BANNED == {"pickle", "getattr"}  # it would be seen


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(sorted(LAYERS)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["type", "layers", "shortcut", "kernel_size", "p", "x"]), inner, max_size=4)
    ),
    max_leaves=20,
)
# Numbers that often fit each other, so that some of the networks can be built.
SMALL = st.sampled_from([1, 1, 2, 3, 3, 3]) | st.integers(-1, 50)
VALUES = {
    "Count": SMALL,
    "Sizes": SMALL | st.lists(SMALL, min_size=1, max_size=3),
    "Shape": st.sampled_from([[8, 6], [6], [3, 8, 6]]) | st.lists(SMALL, max_size=4),
    "Number": st.floats(0, 1) | st.floats(),
    "Flag": st.booleans(),
    "Word": st.sampled_from(["zeros", "reflect", "circular", "same", "none", "tanh"]),
    "Padding": SMALL | st.just("same"),
}


def layers_of(children):
    def arguments(kind):
        known = LAYERS[kind]
        offered = {
            name: VALUES.get(type(argument).__name__, children) | (PLAIN if name == "bias" else st.nothing())
            for name, argument in known.arguments.items()
        }
        required = {name: offered[name] for name in known.required}
        optional = {name: offered[name] for name in offered if name not in required}
        return st.fixed_dictionaries({"type": st.just(kind), **required}, optional=optional)

    return st.lists(st.sampled_from(sorted(LAYERS)).flatmap(arguments), min_size=1, max_size=3)


NETWORKS = layers_of(layers_of(layers_of(st.just([{"type": "ReLU"}]))))
LITTLE = Limits(layers=50, parameters=100_000, values=200_000)


def test_whatever_a_stranger_sends_is_built_or_refused(full):
    tried, longest = {"built": 0, "refused": 0}, [0]

    def attempt(description, shape):
        """What is said against it; a network that was built works, and not only on the meta device."""
        try:
            model = build_described(description, shape=shape, classes=CLASSES, seed=0, limits=LITTLE)
        except UsageError as error:
            tried["refused"] += 1
            longest.append(len(str(error)))
            return str(error)
        tried["built"] += 1
        for count, training in ((2, True), (3, True), (1, False)):
            with torch.no_grad():
                assert model.train(training)(torch.zeros(count, *shape)).shape == (count, CLASSES)
        return ""

    common = settings(
        max_examples=3000 if full else 120, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
    )

    @common
    @given(PLAIN)
    def anything(description):
        attempt(description, SHAPE)
        attempt({"layers": description}, SHAPE)

    @common
    @given(NETWORKS, st.sampled_from([SHAPE, (3, 12), (9,)]))
    def networks(layers, shape):
        first = [conv(3, 3)] if shape == SHAPE else [layer("Linear", in_features=shape[-1], out_features=6)]
        said = attempt({"layers": [*first, *layers]}, shape)
        if made := re.match(r"the layers make \(2, ([\d, ]+)\) of", said):  # a head makes classes of it
            features = math.prod(int(size) for size in re.findall(r"\d+", made[1]))
            attempt({"layers": [*first, *layers, *head(features)]}, shape)

    anything()
    assert tried["refused"]
    networks()
    assert tried["built"] > 5
    assert max(longest) < 800


def drawn(draw, kind):
    """One layer with arguments that are often just about possible."""
    sizes = [1, 1, 2, 2, 3, 3, 3, 4, 6, 9]
    values = {
        "Count": lambda each: draw.choice(sizes),
        "Sizes": lambda each: draw.choice([draw.choice(sizes), [draw.choice(sizes) for _ in range(each.axes)]]),
        "Shape": lambda each: draw.choice([[6], [9], [8, 6], [3, 8, 6], [3, 12]]),
        "Number": lambda each: draw.choice([each.least, each.most, (each.least + each.most) / 2]),
        "Flag": lambda each: draw.random() < 0.5,
        "Word": lambda each: draw.choice(each.known),
        "Padding": lambda each: draw.choice([0, 1, 2, "same", "valid"]),
        "Layers": lambda each: [drawn(draw, draw.choice(sorted(LAYERS))) for _ in range(draw.choice([1, 1, 2]))],
    }
    known = LAYERS[kind]
    chosen = [name for name in known.arguments if name in known.required or draw.random() < 0.3]
    return {
        "type": kind,
        **{name: values[type(known.arguments[name]).__name__](known.arguments[name]) for name in chosen},
    }


def test_what_passes_the_check_trains(full):
    """Networks grown layer by layer, keeping what the check lets pass: what torch then computes must agree with it."""
    draw, used = random.Random(11), set()
    for number in range(400 if full else 40):
        shape = draw.choice([SHAPE, (3, 12), (9,), BLOCK])
        layers, features = [], math.prod(shape)
        for _ in range(12):
            tried = [*layers, drawn(draw, draw.choice(sorted(LAYERS)))]
            # Some last layer is needed that can be trained and makes no classes yet: then the complaint has the shape.
            last = [layer("Flatten"), layer("BatchNorm1d", num_features=1)]
            with pytest.raises(UsageError) as refusal:
                check_description({"layers": [*tried, *last]}, shape=shape, classes=CLASSES, limits=LITTLE)
            made = re.search(
                rf"layer {len(tried) + 1} \(BatchNorm1d\): an input with (\d+) channels", str(refusal.value)
            )
            with suppress(UsageError):
                found = int(made[1]) if made else 1
                check_description({"layers": [*tried, *head(found)]}, shape=shape, classes=CLASSES, limits=LITTLE)
                layers, features = tried, found
        model = build([*layers, *head(features)], shape=shape, limits=LITTLE)
        loss = cross_entropy(model(images(3, shape)), torch.arange(3))
        loss.backward()
        used |= {entry["type"] for entry in layers}
        assert model.eval()(images(1, shape)).shape == (1, CLASSES), number
    assert len(used) > 25
