"""The blocks of a model: its repeated layers, which are checkpointed, compiled and gathered one by one."""

from __future__ import annotations

from torch import nn


def find_stacks(model: nn.Module) -> dict[str, dict[str, nn.Module]]:
    """Return the outermost lists of two or more layers, by name, with their members by name."""
    stacks: dict[str, dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        if any(is_inside(name, outer) for outer in stacks):
            continue
        children = list(module.named_children())
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(children) > 1 and _are_layers(children):
            stacks[name] = {f"{name}.{key}" if name else key: child for key, child in children}
    return stacks


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the members of a model's outermost lists of layers, by name; of a model without lists, none."""
    return {name: block for stack in find_stacks(model).values() for name, block in stack.items()}


def is_inside(name: str, stack: str) -> bool:
    """Whether a module is below a list, both by name."""
    return bool(name) and (not stack or name.startswith(f"{stack}."))


def find_stage_blocks(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return those of a model's blocks that are still in it, after the others were left to other stages."""
    kept = {id(module) for module in model.modules()}
    return {name: block for name, block in blocks.items() if id(block) in kept}


def _are_layers(children: list[tuple[str, nn.Module]]) -> bool:
    modules = [child for _, child in children]
    if not all(next(child.parameters(), None) is not None for child in modules):
        return False
    return len({type(child) for child in modules}) == 1 or all(next(child.children(), None) for child in modules)
