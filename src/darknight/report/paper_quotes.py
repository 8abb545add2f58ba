"""What the paper prints, as it prints it: the only place with its numbers. Whatever shows one says that it is quoted.

Hashemi, Wang, Annavaram, "Privacy and Integrity Preserving Training Using Trusted Hardware", 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PAPER = "Hashemi, Wang, Annavaram, Privacy and Integrity Preserving Training Using Trusted Hardware, 2021"

# --- Table 1 ----------------------------------------------------------------------------------------------------------
FEATURES = (
    "training",
    "inference",
    "differential privacy",
    "multi-party computation",
    "homomorphic encryption",
    "trusted hardware",
    "data privacy",
    "model private from client",
    "model private from server",
    "integrity",
    "GPU",
    "large networks",
)
# In the order of FEATURES, y or n. A few cells look odd (Origami without trusted hardware); they are as printed.
TABLE_1: Mapping[str, str] = {
    "SecureNN": "yynynnyyynyn",
    "Chiron": "yynnnyyyyynn",
    "MSP": "yynnnyyyyynn",
    "Gazelle": "nynnynynnnyy",
    "MiniONN": "nynyynyynnyy",
    "CryptoNets": "nynyynyynnyy",
    "Slalom": "nynnnyyynyyy",
    "Origami": "nynnnnynnnyy",
    "Shredder": "nnnnnyynnnyy",
    "Delphi": "nynyyyyynnyy",
    "DarKnight (the paper)": "yynnnyyynyyy",
}


# --- Table 2 ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Printed:
    """Accuracies on ImageNet in percent, top 1 and top 5, and the bound of leakage; None where none is printed."""

    vgg16: tuple[float, float]
    resnet152: tuple[float, float]
    mobilenet_v1: tuple[float, float]
    leakage: float | None


# By noise, N(mean, variance). Settings: K=2, ratio of squared coefficients below 10, inputs within 1.
TABLE_2: Mapping[str, Printed] = {
    "clear": Printed(vgg16=(64.26, 85.01), resnet152=(72.93, 90.60), mobilenet_v1=(64.96, 85.29), leakage=None),
    "N(4e3, 1.6e7)": Printed(
        vgg16=(64.23, 85.01), resnet152=(72.46, 90.47), mobilenet_v1=(64.99, 85.26), leakage=1.25e-6
    ),
    "N(1e4, 2.5e7)": Printed(
        vgg16=(64.25, 85.06), resnet152=(72.35, 90.23), mobilenet_v1=(64.81, 85.26), leakage=0.8e-6
    ),
    "N(1e4, 1e8)": Printed(vgg16=(64.25, 85.05), resnet152=(71.87, 89.93), mobilenet_v1=(64.54, 85.15), leakage=2e-7),
    "N(0, 4e8)": Printed(vgg16=(64.24, 85.01), resnet152=(72.24, 90.09), mobilenet_v1=(64.87, 85.19), leakage=5e-8),
}

# --- Figures ----------------------------------------------------------------------------------------------------------
# Speed-up of training over everything in SGX, and as it is printed.
FIGURE_2: Mapping[str, float] = {"vgg16": 8.0, "resnet152": 4.2, "mobilenet-v2": 2.2}
FIGURE_2_PRINTED: Mapping[str, str] = {"vgg16": "more than 8", "resnet152": "4.2", "mobilenet-v2": "2.2"}
FIGURE_2_PARTS = "VGG16: linear 23 times, non-linear 1.89 times, in total more than 8 times"
FIGURE_2_SETTING = "K=2, three GPUs (GTX 1080 Ti), Intel E-2174G with SGX, ImageNet"
FIGURE_3 = (
    "VGG16, ResNet152 and MobileNetV2 on CIFAR-100; at variance 1e8 VGG16 loses less than 0.001 of its accuracy after "
    "epoch 50"
)
