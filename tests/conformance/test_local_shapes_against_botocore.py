"""The local Kinesis knows exactly the operations and request shapes of botocore's service model, Channels aside.

A newer botocore that adds an operation or a member fails here first. Two patterns are written without the anchors
and the group that the model puts around them, because the service quotes them so in its messages.
"""

import re

import botocore.session
import pytest

from anabranch.local.actions.calls import ACTIONS
from anabranch.local.shapes import (
    REQUESTS,
    BlobShape,
    BooleanShape,
    IntegerShape,
    ListShape,
    MapShape,
    StringShape,
    StructureShape,
    TimestampShape,
)

MODEL = botocore.session.Session().get_service_model("kinesis")
OPERATIONS = [name for name in MODEL.operation_names if "Channel" not in name]


def test_all_operations_except_those_for_channels_exist():
    assert sorted(REQUESTS) == OPERATIONS
    assert sorted({*ACTIONS, "PutRecords", "SubscribeToShard"}) == OPERATIONS
    assert len(MODEL.operation_names) - len(OPERATIONS) == 5


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_request_has_the_members_and_constraints_of_the_model(operation):
    assert described(REQUESTS[operation]) == modelled(MODEL.operation_model(operation).input_shape)


def without_none(kind, **constraints):
    return {"kind": kind, **{name: value for name, value in constraints.items() if value is not None}}


def described(shape):
    match shape:
        case StructureShape():
            members = {name: described(member) for name, member in shape.members.items()}
            return {"kind": "structure", "members": members, "required": sorted(shape.required)}
        case ListShape():
            return without_none("list", item=described(shape.item), min=shape.length_min, max=shape.length_max)
        case MapShape():
            key, value = described(shape.key), described(shape.value)
            return without_none("map", key=key, value=value, min=shape.length_min, max=shape.length_max)
        case StringShape():
            values = None if shape.values is None else sorted(shape.values)
            return without_none(
                "string", min=shape.length_min, max=shape.length_max, pattern=shape.pattern, values=values
            )
        case IntegerShape():
            return without_none("integer", min=shape.value_min, max=shape.value_max)
        case BlobShape():
            return without_none("blob", min=0, max=shape.length_max)
        case BooleanShape():
            return {"kind": "boolean"}
        case TimestampShape():
            return {"kind": "timestamp"}


def modelled(shape):
    limits = {"min": shape.metadata.get("min"), "max": shape.metadata.get("max")}
    match shape.type_name:
        case "structure":
            members = {name: modelled(member) for name, member in shape.members.items()}
            return {"kind": "structure", "members": members, "required": sorted(shape.required_members)}
        case "list":
            return without_none("list", item=modelled(shape.member), **limits)
        case "map":
            return without_none("map", key=modelled(shape.key), value=modelled(shape.value), **limits)
        case "string":
            pattern = shape.metadata.get("pattern")
            if pattern is not None:
                pattern = re.sub(r"^\^\((.*)\)\$$", r"\1", pattern).removeprefix("^")
            values = sorted(shape.enum) or None
            return without_none("string", pattern=pattern, values=values, **limits)
        case kind:
            return without_none(kind, **limits)
