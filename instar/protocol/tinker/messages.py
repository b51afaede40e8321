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

# The types of each message's fields, in the order of their numbers from 1. Types with `*` are repeated.
_MESSAGES: dict[str, dict[str, str]] = {
    "Text": {"tokens": "bytes"},
    "Chunk": {"encoded_text": "Text", "image": "bytes", "dmel": "bytes"},
    "Tensor": {"dense": "bytes", "sparse_csr": "bytes", "dtype": "int32", "shape": "int64*"},
    "NamedTensor": {"key": "string", "value": "Tensor"},
    "Datum": {"model_input": "Chunk*", "loss_fn_inputs": "NamedTensor*"},
    "NamedNumber": {"key": "string", "value": "double"},
    "Setting": {"number": "double", "text": "string"},
    "NamedSetting": {"key": "string", "value": "Setting"},
    "ForwardBackwardRequest": {
        "model_id": "string",
        "seq_id": "int32",
        "data": "Datum*",
        "loss_fn": "string",
        "loss_fn_config": "NamedNumber*",
        "forward_only": "bool",
        "loss_fn_config_v2": "NamedSetting*",
    },
    "BatchedTensor": {"data": "bytes", "offsets": "bytes", "dtype": "int32"},
    "NamedBatch": {"key": "string", "value": "BatchedTensor"},
    "ArrayRecord": {"type_tag": "string", "fields": "NamedBatch*", "num_datums": "int64"},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": "string",
        "loss_fn_outputs": "ArrayRecord*",
        "metrics": "NamedNumber*",
    },
    "SampledSequence": {"stop_reason": "int32", "tokens": "bytes", "logprobs": "bytes"},
    "SampleResponse": {"sequences": "SampledSequence*", "prompt_logprobs": "bytes"},
}


def _build_file_descriptor() -> FileDescriptorProto:
    file = FileDescriptorProto(name="instar/tinker.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (field_name, type_name) in enumerate(fields.items(), start=1):
            base_type = type_name.removesuffix("*")
            field = message.field.add(name=field_name, number=number)
            label = "LABEL_REPEATED" if type_name.endswith("*") else "LABEL_OPTIONAL"
            field.label = FieldDescriptorProto.Label.Value(label)
            if base_type not in _MESSAGES:
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
