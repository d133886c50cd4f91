"""Read the config of MiMo: Qwen 2 with layers for multi-token prediction, which Ingot does not use."""

from dataclasses import replace

from ingot.models.blocks.decoder import DecoderNames, DecoderSpec
from ingot.models.config import ConfigReader
from ingot.models.families.qwen import qwen2

_NAMES = DecoderNames(unread=(*DecoderNames.unread, r"model\.mtp_layers\..*"))


def mimo(config: ConfigReader) -> DecoderSpec:
    config.require("attention_bias", (True,), True)
    return replace(qwen2(config), names=_NAMES)
