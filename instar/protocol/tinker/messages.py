"""The protobuf messages of Tinker's protocol that the server reads or writes.

The messages are declared here so that the server does not need the `tinker` package and works with every
version of it. Unsupported fields are declared as bytes, so that the server can reject them by name. Maps are
declared as repeated messages with a key and a value, which have the same wire format.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

# Tensor dtypes.
FLOAT32, INT64, INT32 = 1, 2, 3
STOP_REASON_STOP, STOP_REASON_LENGTH = 0, 1

_PACKAGE = "instar.tinker"
_SCALARS = ("double", "int64", "int32", "bool", "string", "bytes")

# The number and type of each field, by message and field name. Types with `*` are repeated.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "Text": {"tokens": (1, "bytes")},
    "Chunk": {"encoded_text": (1, "Text"), "image": (2, "bytes"), "dmel": (3, "bytes")},
    "Tensor": {
        "dense": (1, "bytes"),
        "sparse_csr": (2, "bytes"),
        "dtype": (3, "int32"),
        "shape": (4, "int64*"),
    },
    "NamedTensor": {"key": (1, "string"), "value": (2, "Tensor")},
    "Datum": {"model_input": (1, "Chunk*"), "loss_fn_inputs": (2, "NamedTensor*")},
    "NamedNumber": {"key": (1, "string"), "value": (2, "double")},
    "Setting": {"number": (1, "double"), "text": (2, "string")},
    "NamedSetting": {"key": (1, "string"), "value": (2, "Setting")},
    "ForwardBackwardRequest": {
        "model_id": (1, "string"),
        "seq_id": (2, "int32"),
        "data": (3, "Datum*"),
        "loss_fn": (4, "string"),
        "loss_fn_config": (5, "NamedNumber*"),
        "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "NamedSetting*"),
    },
    "BatchedTensor": {"data": (1, "bytes"), "offsets": (2, "bytes"), "dtype": (3, "int32")},
    "NamedBatch": {"key": (1, "string"), "value": (2, "BatchedTensor")},
    "ArrayRecord": {"type_tag": (1, "string"), "fields": (2, "NamedBatch*"), "num_datums": (3, "int64")},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"),
        "loss_fn_outputs": (2, "ArrayRecord*"),
        "metrics": (3, "NamedNumber*"),
    },
    "SampledSequence": {"stop_reason": (1, "int32"), "tokens": (2, "bytes"), "logprobs": (3, "bytes")},
    "SampleResponse": {"sequences": (1, "SampledSequence*"), "prompt_logprobs": (2, "bytes")},
}


def _build_file_descriptor() -> FileDescriptorProto:
    file = FileDescriptorProto(name="instar/tinker.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, (number, type_name) in fields.items():
            base_type = type_name.removesuffix("*")
            field = message.field.add(name=field_name, number=number)
            label = "LABEL_REPEATED" if type_name.endswith("*") else "LABEL_OPTIONAL"
            field.label = FieldDescriptorProto.Label.Value(label)
            if base_type in _SCALARS:
                field.type = FieldDescriptorProto.Type.Value(f"TYPE_{base_type.upper()}")
            else:
                field.type = FieldDescriptorProto.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{base_type}"
    return file


# A separate pool, because an SDK in the same process registers its own messages in the default pool.
_pool = DescriptorPool()
_pool.AddSerializedFile(_build_file_descriptor().SerializeToString())


def _get_message_class(name: str) -> Any:
    return GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


ForwardBackwardRequest: Any = _get_message_class("ForwardBackwardRequest")
ForwardBackwardOutput: Any = _get_message_class("ForwardBackwardOutput")
SampleResponse: Any = _get_message_class("SampleResponse")
