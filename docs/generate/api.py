"""docs/api/api.md: both services' contract, from the comments of the protos."""

import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)

from docs.generate.markdown import code_span, head, prose, slug, table

_PROTOS = Path(__file__).resolve().parents[2] / "protos"
_INTRO = """\
Every method, message and error of both services, from the comments of the files in [protos/](../../protos). In headings,
`cache.v1` is short for the package `kvkeeper.cache.v1`, and `engine.v1` for `kvkeeper.engine.v1`."""
# Numbers of fields in the descriptors of files, messages, enums and services, of which paths to comments are made.
_FILE_MESSAGE, _FILE_ENUM, _FILE_SERVICE, _FILE_SYNTAX = 4, 5, 6, 12
_MESSAGE_FIELD, _ENUM_VALUE, _SERVICE_METHOD = 2, 2, 2
_OF_METHOD = re.compile(r"^(Request|Answer) of \w+\.")  # the heading says it


def page() -> str:
    lines = head("API", _INTRO)
    files = [_File(file) for file in _descriptors().file]
    for file in files:
        (service,) = file.proto.service
        lines.append(f"- [{file.package}.{service.name}](#{slug(f'{file.short}.{service.name}')}):")
        lines.append(f"  {prose(file.comment(_FILE_SERVICE, 0))}")
        lines.append(f"  [Error reasons](#{slug(f'{file.short}.ErrorReason')})")
    lines.append("")
    for file in files:
        lines += file.page()
    return "\n".join(lines).rstrip() + "\n"


def _descriptors() -> FileDescriptorSet:
    from grpc_tools import protoc  # of the development environment

    sources = sorted(str(path.relative_to(_PROTOS)) for path in _PROTOS.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        described = Path(folder) / "descriptors"
        args = ["protoc", f"-I{_PROTOS}", f"--descriptor_set_out={described}", "--include_source_info", *sources]
        if protoc.main(args) != 0:
            raise RuntimeError(f"protoc failed on {', '.join(sources)}")
        return FileDescriptorSet.FromString(described.read_bytes())


@dataclass(slots=True)
class _File:
    """One .proto: comments by path, numbers of messages by name, the methods that tell a message, and what is told already."""

    proto: FileDescriptorProto
    comments: dict[tuple[int, ...], str] = field(default_factory=dict)
    messages: dict[str, int] = field(default_factory=dict)
    homes: dict[str, str] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for location in self.proto.source_code_info.location:
            self.comments[tuple(location.path)] = location.leading_comments
        self.messages = {message.name: number for number, message in enumerate(self.proto.message_type)}
        for service in self.proto.service:
            for method in service.method:
                for full_name in (method.input_type, method.output_type):
                    self.homes.setdefault(full_name.rpartition(".")[2], f"{service.name}.{method.name}")

    @property
    def package(self) -> str:
        return self.proto.package

    @property
    def short(self) -> str:
        return self.package.removeprefix("kvkeeper.")

    def comment(self, *path: int) -> str:
        """Without what is meant for tools."""
        lines = self.comments.get(path, "").splitlines()
        return "\n".join(line.strip() for line in lines if not line.strip().startswith("buf:lint:"))

    def page(self) -> list[str]:
        (service,) = self.proto.service
        lines = [f"## {self.short}.{service.name}", ""]
        lines += _paragraphs(self.comment(_FILE_SYNTAX))
        methods = [(method, self.comment(_FILE_SERVICE, 0, _SERVICE_METHOD, n)) for n, method in enumerate(service.method)]
        rows = [[self._link(f"{service.name}.{method.name}", method.name), prose(_first(text))] for method, text in methods]
        lines += table(["method", "what it does"], rows)
        for method, text in methods:
            lines += self._method(service.name, method, text)
        lines += [f"## Messages of {self.short}", ""]
        for name in self.messages:
            if name not in self.told:
                lines += [f"### {self.short}.{name}", "", *self._message(name)]
        lines += [f"## Enums of {self.short}", ""]
        for number, enum in enumerate(self.proto.enum_type):
            lines += self._enum(number, enum)
        return lines

    def _method(self, service: str, method: MethodDescriptorProto, text: str) -> list[str]:
        lines = [f"### {self.short}.{service}.{method.name}", "", *_paragraphs(text)]
        for kind, full_name, is_stream in (
            ("Request", method.input_type, method.client_streaming),
            ("Response", method.output_type, method.server_streaming),
        ):
            name = full_name.rpartition(".")[2]
            title = f"{kind}{', a stream' if is_stream else ''}: `{name}`"
            if name in self.told:
                lines += [f"{title}, see above.", ""]
                continue
            lines += [f"{title}.", "", *self._message(name)]
        return lines

    def _message(self, name: str) -> list[str]:
        self.told.add(name)
        number = self.messages[name]
        message = self.proto.message_type[number]
        lines = _paragraphs(_OF_METHOD.sub("", self.comment(_FILE_MESSAGE, number)))
        rows = [
            [str(one.number), code_span(one.name), self._type(message, one), prose(self._of_field(number, place))]
            for place, one in enumerate(message.field)
        ]
        return lines + (table(["no.", "field", "type", "meaning"], rows) if rows else ["It has no fields.", ""])

    def _of_field(self, message: int, place: int) -> str:
        return self.comment(_FILE_MESSAGE, message, _MESSAGE_FIELD, place)

    def _type(self, message: DescriptorProto, one: FieldDescriptorProto) -> str:
        full_name = one.type_name.removeprefix(".")
        nested = {entry.name: entry for entry in message.nested_type if entry.options.map_entry}
        if (entry := nested.get(full_name.rpartition(".")[2])) is not None:
            key, value = entry.field
            return prose(f"map of {_scalar(key)} to {_scalar(value) if not value.type_name else value.type_name}")
        if full_name:
            name = full_name.removeprefix(f"{self.package}.")
            text = (
                self._link(self.homes.get(name, name), name)
                if full_name.startswith(f"{self.package}.")
                else code_span(full_name)
            )
        else:
            text = _scalar(one)
        if one.label == FieldDescriptorProto.LABEL_REPEATED:
            return f"repeated {text}"
        if one.proto3_optional:
            return f"optional {text}"
        if one.HasField("oneof_index"):
            return f"{text}, one of {code_span(message.oneof_decl[one.oneof_index].name)}"
        return text

    def _link(self, name: str, text: str) -> str:
        return f"[{text}](#{slug(f'{self.short}.{name}')})"

    def _enum(self, number: int, enum: EnumDescriptorProto) -> list[str]:
        lines = [f"### {self.short}.{enum.name}", "", *_paragraphs(self.comment(_FILE_ENUM, number))]
        values = [(one, self.comment(_FILE_ENUM, number, _ENUM_VALUE, n)) for n, one in enumerate(enum.value)]
        if enum.name != "ErrorReason":
            rows = [[str(one.number), code_span(one.name), prose(text)] for one, text in values]
            return lines + table(["no.", "value", "meaning"], rows)
        rows = []
        for one, text in values[1:]:
            status, _, meaning = text.partition(":")
            rows.append([code_span(one.name.removeprefix("ERROR_REASON_")), prose(status), prose(_capitalized(meaning))])
        return lines + table(["reason", "status", "meaning"], rows)


def _scalar(one: FieldDescriptorProto) -> str:
    return FieldDescriptorProto.Type.Name(one.type).removeprefix("TYPE_").lower()


def _paragraphs(comment: str) -> list[str]:
    """Those of a comment, and the errors of a method on their own."""
    blocks = [part for block in comment.split("\n\n") for part in re.split(r"(?=\bErrors: )", block) if part.strip()]
    return [line for block in blocks for line in (prose(block), "")]


def _capitalized(text: str) -> str:
    text = text.strip()
    return text[:1].upper() + text[1:]


def _first(comment: str) -> str:
    """Its first sentence."""
    return re.split(r"(?<=\.)\s", comment.strip(), maxsplit=1)[0]
