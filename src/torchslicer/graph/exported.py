"""From the program that `torch.export` recorded to a `ModelGraph` on the model's own tensors."""

from __future__ import annotations

import ast
import dataclasses
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind
from torch.utils import _pytree as pytree

from torchslicer.errors import TraceError
from torchslicer.graph.auxloss import add_aux_loss
from torchslicer.graph.checks import check_relation, check_size, check_value, evaluate, hand_on, unpack
from torchslicer.graph.fx import tensor_names
from torchslicer.graph.model import DEFAULT_AMBIENT, SOURCES, Ambient, GraphInput, ModelGraph, Node, Op, Ref
from torchslicer.graph.units import form_units

_KINDS: dict[InputKind, Op] = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_FIXES_A_SIZE = re.compile(r"[^%/]+ == \d+")
_PLAIN_MODULES = ("_operator", "builtins", "math", "torch")

Path = tuple[Any, ...]


class FixedRelationError(Exception):
    """A relation between open sizes was taken for granted that cannot be checked at run time."""


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """One tensor or plain value inside the inputs: where it is, what it was, and the node that fetches it."""

    path: Path
    value: Any
    ref: Ref

    @property
    def name(self) -> str:
        first, *rest = self.path
        return str(first) + "".join(f"[{key!r}]" for key in rest)


class ExportConverter:
    """Turns one exported program into nodes, and the nodes into units.

    Args:
        model: The model that was exported.
        exported: The record.
        example: The inputs that it was made for, by name.
        strict: Whether to raise `FixedRelationError` where a relation of sizes cannot be checked at run time.
    """

    def __init__(
        self, model: nn.Module, exported: ExportedProgram, example: Mapping[str, Any], *, strict: bool
    ) -> None:
        self.model = model
        self.exported = exported
        self.example = example
        self.strict = strict
        self.names = tensor_names(model)
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.nodes: list[Node] = []
        self.calls: dict[int, str] = {}
        self.whole: dict[str, nn.Module] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.taken: set[str] = set()
        self.leaves: list[_Leaf] = []

    def convert(self) -> ModelGraph:
        """Return the graph."""
        inputs = [GraphInput(name, self._add(name, "input", name).index) for name in self.example]
        for entry in inputs:
            self._unfold((entry.name,), self.example[entry.name], Ref(entry.node))
        placeholders, specs = self._placeholders()
        made = self._bind(placeholders, specs)
        self._check_relations(placeholders, specs)
        results = self._walk(self.exported.graph_module, made, DEFAULT_AMBIENT)
        output = self._output(results)
        return ModelGraph(
            source="export",
            model=self.model,
            modules=self.whole,
            parameters=dict(self.model.named_parameters()),
            buffers=dict(self.model.named_buffers()),
            constants=self.constants,
            nodes=tuple(self.nodes),
            units=form_units(self.nodes, self.whole, self.names, lambda _: "module", self.calls),
            inputs=tuple(inputs),
            output=output,
        )

    def _add(
        self,
        name: str,
        op: Op,
        target: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        place: tuple[str, str | None] = ("", None),
        ambient: Ambient = DEFAULT_AMBIENT,
    ) -> Ref:
        index, scope, call = len(self.nodes), *place
        unique = name if name not in self.taken else f"{name}_{index}"
        self.taken.add(unique)
        self.nodes.append(Node(index, unique, op, target, args, dict(kwargs or {}), scope, ambient))
        if call is not None:
            self.calls[index] = call
        return Ref(index)

    # ------------------------------------------------------------------------------------------------ inputs, sources

    def _unfold(self, path: Path, value: Any, ref: Ref) -> None:
        """Fetch the leaves of a nested input, in the order in which torch.export lists them."""
        if not isinstance(value, (dict, list, tuple)):
            if not pytree.tree_structure(value).is_leaf():
                raise TraceError(f"torch.export: input '{path[0]}' holds a {type(value).__name__}; pass its tensors")
            self.leaves.append(_Leaf(path, value, ref))
            return
        keys = tuple(value) if isinstance(value, dict) else range(len(value))
        name = _Leaf(path, value, ref).name
        wanted = keys if isinstance(keys, tuple) else len(keys)
        items = self._add(f"{path[0]}_items", "function", unpack, (ref, wanted, name))
        for position, key in enumerate(keys):
            item = self._add(f"{path[0]}_item", "function", operator.getitem, (items, position))
            self._unfold((*path, key), value[key], item)

    def _placeholders(self) -> tuple[list[fx.Node], list[InputSpec]]:
        placeholders = [node for node in self.exported.graph.nodes if node.op == "placeholder"]
        return placeholders, list(self.exported.graph_signature.input_specs)

    def _bind(self, placeholders: Sequence[fx.Node], specs: Sequence[InputSpec]) -> dict[fx.Node, Any]:
        """Return what stands for each placeholder, and check what was taken for granted of the inputs."""
        made: dict[fx.Node, Any] = {}
        leaves = iter(self.leaves)
        for node, spec in zip(placeholders, specs, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                leaf = next(leaves)
                made[node] = leaf.ref
                self._check_input(leaf, node)
            elif spec.kind in _KINDS:
                if node.users:
                    made[node] = self._source(_KINDS[spec.kind], str(spec.target))
            else:
                raise TraceError(f"torch.export: the model uses a {spec.kind.name.lower()} ('{spec.target}')")
        return made

    def _source(self, op: Op, target: str) -> Ref:
        if op == "constant":
            self.constants[target] = self.exported.constants[target]
            return self._add(target, op, target)
        owner, _, attribute = target.rpartition(".")
        name = self.names[id(getattr(self.model.get_submodule(owner), attribute))]
        return self._add(name.replace(".", "_"), op, name)

    def _check_input(self, leaf: _Leaf, node: fx.Node) -> None:
        if not isinstance(leaf.value, torch.Tensor):
            self._add("check", "function", check_value, (leaf.ref, leaf.value, leaf.name))
            return
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, int):
                self._add("check", "function", check_size, (leaf.ref, dim, size, leaf.name))

    def _check_relations(self, placeholders: Sequence[fx.Node], specs: Sequence[InputSpec]) -> None:
        user = [node for node, spec in zip(placeholders, specs, strict=True) if spec.kind is InputKind.USER_INPUT]
        is_open = {
            (index, dim)
            for index, node in enumerate(user)
            if isinstance(node.meta.get("val"), torch.Tensor)
            for dim, size in enumerate(node.meta["val"].shape)
            if not isinstance(size, int)
        }
        for guard in getattr(self.exported, "_guards_code", ()):
            self._check_relation(guard, is_open)

    def _check_relation(self, guard: str, is_open: set[tuple[int, int]]) -> None:
        """Add a check of *guard*, unless it follows from the sizes that are fixed anyway."""
        sizes = _Sizes({leaf.path: index for index, leaf in enumerate(self.leaves)})
        relation = ast.unparse(sizes.visit(ast.parse(guard, mode="eval").body))
        if sizes.used and not sizes.used & is_open:
            return
        leaves = [self.leaves[index] for index in sizes.tensors]
        try:
            holds = evaluate(relation, [tuple(leaf.value.shape) for leaf in leaves])
        except (ValueError, AttributeError, LookupError, TypeError):
            holds = False
        if holds and len(sizes.used) == 1 and _FIXES_A_SIZE.fullmatch(relation):
            (_, dim), leaf = *sizes.used, leaves[0]
            self._add("check", "function", check_size, (leaf.ref, dim, leaf.value.shape[dim], leaf.name))
        elif holds:
            names = tuple(leaf.name for leaf in leaves)
            self._add("check", "function", check_relation, (relation, names, *(leaf.ref for leaf in leaves)))
        elif self.strict:
            raise FixedRelationError(f"the path through the model depends on {guard}")

    # ------------------------------------------------------------------------------------------------ operations

    def _walk(self, module: fx.GraphModule, made: dict[fx.Node, Any], ambient: Ambient) -> Any:
        """Add the operations of *module* and return what it returns; *made* holds its placeholders."""
        places: dict[fx.Node, tuple[str, str | None]] = {}
        for node in module.graph.nodes:
            if node.op == "output":
                return self._argument(node.args[0], made)
            if node.op == "get_attr":
                made[node] = self._attribute(module, node)
            elif node.op == "call_function" and node.target is torch._C._set_grad_enabled:
                ambient = dataclasses.replace(ambient, grad_enabled=bool(node.args[0]))
            elif node.op == "call_function":
                places[node] = self._place(node, places)
                made[node] = self._operation(node, made, ambient, places[node])
        raise AssertionError("an exported graph without an output")

    def _attribute(self, module: fx.GraphModule, node: fx.Node) -> Any:
        value = operator.attrgetter(str(node.target))(module)
        if not isinstance(value, torch.Tensor):
            return value
        name = f"_constant_{len(self.constants)}"
        self.constants[name] = value
        return self._add(name, "constant", name)

    def _operation(
        self, node: fx.Node, made: dict[fx.Node, Any], ambient: Ambient, place: tuple[str, str | None]
    ) -> Any:
        target: Any = node.target
        if target is torch.ops.aten._assert_tensor_metadata.default:
            return None  # says what the example's dtype was; under mixed precision it would be another
        args = self._argument(tuple(node.args), made)
        if place[1] is not None and type(self.modules[place[0]]) in _BATCH_NORMS:
            return self._batch_norm(node, args, ambient, place[0])
        if isinstance(target, HigherOrderOperator):
            return self._inlined(target, args, ambient)
        if target is operator.getitem and isinstance(args[0], (tuple, list)):
            return args[0][args[1]]
        if target is torch.ops.torchslicer.aux_loss.default:
            target = add_aux_loss
        elif not isinstance(target, OpOverload) and getattr(target, "__module__", None) not in _PLAIN_MODULES:
            raise TraceError(f"torch.export: cannot run the operation {getattr(target, '__name__', target)!r}")
        kwargs = self._argument(dict(node.kwargs), made)
        return self._add(node.name, "function", target, args, kwargs, place=place, ambient=ambient)

    def _batch_norm(self, node: fx.Node, args: tuple[Any, ...], ambient: Ambient, path: str) -> Any:
        """Keep a BatchNorm whole, since its statistics may be deferred; it counts its batches itself."""
        if node.target is not torch.ops.aten.batch_norm.default:
            return None
        self.whole[path] = self.modules[path]
        return self._add(node.name, "module", path, args[:1], place=(path.rpartition(".")[0], None), ambient=ambient)

    def _inlined(self, target: HigherOrderOperator, args: tuple[Any, ...], ambient: Ambient) -> Any:
        """Add the operations of a region that runs under ``no_grad`` or autocast."""
        name = target.name()
        if name == "wrap_with_set_grad_enabled":
            enabled, body, *operands = args
            inner = dataclasses.replace(ambient, grad_enabled=enabled)
        elif name == "wrap_with_autocast":
            device, dtype, enabled, _, body, *operands = args
            dtype = torch.get_autocast_dtype(device) if dtype is None else dtype
            inner = dataclasses.replace(ambient, autocast=(device, enabled, dtype))
        else:
            raise TraceError(f"torch.export: the model uses the higher-order operation {name}, which cannot be cut")
        placeholders = [node for node in body.graph.nodes if node.op == "placeholder"]
        return self._walk(body, dict(zip(placeholders, operands, strict=True)), inner)

    def _argument(self, value: Any, made: Mapping[fx.Node, Any]) -> Any:
        """Replace fx nodes by what stands for them, and fx's immutable collections by plain ones."""
        if isinstance(value, fx.Node):
            return made[value]
        if isinstance(value, tuple):
            return tuple(self._argument(item, made) for item in value)
        if isinstance(value, list):
            return [self._argument(item, made) for item in value]
        if isinstance(value, Mapping):
            return {key: self._argument(item, made) for key, item in value.items()}
        return value

    def _place(self, node: fx.Node, places: Mapping[fx.Node, tuple[str, str | None]]) -> tuple[str, str | None]:
        """Return the path of the module that issued *node* and, for a leaf module, a key of the call."""
        stack = node.meta.get("nn_module_stack") or {}
        key, path = next(((key, entry[0]) for key, entry in reversed(list(stack.items()))), ("", ""))
        if (
            not stack or path not in self.modules
        ):  # sizes that torch.export asked for itself belong to what they are sizes of
            return next((places[source] for source in node.all_input_nodes if source in places), ("", None))
        return path, key if path and _is_leaf(self.modules[path]) else None

    # ------------------------------------------------------------------------------------------------ output

    def _output(self, results: Sequence[Any]) -> Any:
        for spec in self.exported.graph_signature.output_specs:
            if spec.kind is not OutputKind.USER_OUTPUT:
                raise TraceError(
                    f"torch.export: the model has an effect that cannot be kept ({spec.kind.name.lower()})"
                )
        leaves = iter([self._returned(result) for result in results])
        structure = self.exported.call_spec.out_spec
        assert structure is not None
        return self._rebuilt(structure, leaves)

    def _returned(self, result: Any) -> Any:
        if isinstance(result, Ref) and self.nodes[result.index].op in SOURCES:
            return self._add("returned", "function", hand_on, (result,))
        return result

    def _rebuilt(self, spec: pytree.TreeSpec, leaves: Iterator[Any]) -> Any:
        """Return the structure that the model returns; objects are built by a node of their own."""
        if spec.is_leaf():
            return next(leaves)
        kind, context = spec.type, spec.context
        items = [self._rebuilt(child, leaves) for child in _children(spec)]
        if kind in (tuple, list):
            return kind(items)
        if kind is dict:
            return dict(zip(context, items, strict=True))
        if pytree.is_namedtuple_class(context):
            return context(*items)
        if dataclasses.is_dataclass(kind) and _are_fields(context, len(items)):
            return self._add("returned", "function", kind, (), dict(zip(context, items, strict=True)))
        shallow = pytree.TreeSpec(kind, context, [pytree.tree_structure(0) for _ in items])
        return self._add("returned", "function", pytree.tree_unflatten, (items, shallow))


class _Sizes(ast.NodeTransformer):
    """Rewrites ``L['x'].size()[0]`` to ``sizes[i][0]``, and notes which sizes of which leaves are used."""

    def __init__(self, leaves: Mapping[Path, int]) -> None:
        self.leaves = leaves
        self.tensors: list[int] = []
        self.used: set[tuple[int, int]] = set()

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Rewrite one use of a size; leave anything else as it is."""
        match node:
            case ast.Subscript(
                value=ast.Call(func=ast.Attribute(attr="size", value=base), args=[]), slice=ast.Constant(value=int(dim))
            ) if (index := self.leaves.get(_path(base))) is not None:
                self.used.add((index, dim))
                if index not in self.tensors:
                    self.tensors.append(index)
                return ast.parse(f"sizes[{self.tensors.index(index)}][{dim}]", mode="eval").body
        return node


def _path(node: ast.expr) -> Path:
    keys: list[Any] = []
    while isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        keys.insert(0, node.slice.value)
        node = node.value
    return tuple(keys)


def _is_leaf(module: nn.Module) -> bool:
    """Whether a call of *module* stays whole: it has no modules inside, or does not call them as modules."""
    return isinstance(module, nn.MultiheadAttention) or next(module.children(), None) is None


def _children(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    return spec.children() if hasattr(spec, "children") else list(spec.children_specs)


def _are_fields(context: Any, count: int) -> bool:
    return isinstance(context, (list, tuple)) and len(context) == count and all(isinstance(k, str) for k in context)
