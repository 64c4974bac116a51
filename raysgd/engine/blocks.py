"""The blocks of a model: its repeated layers, which are checkpointed, compiled and gathered one by one."""

from __future__ import annotations

from torch import nn


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the members of the outermost lists of two or more layers, by name; of a model without lists, none."""
    blocks: dict[str, nn.Module] = {}
    lists: list[str] = []
    for name, module in model.named_modules():
        if any(not outer or name == outer or name.startswith(f"{outer}.") for outer in lists):
            continue
        children = list(module.named_children())
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(children) > 1 and _are_layers(children):
            lists.append(name)
            blocks |= {f"{name}.{key}" if name else key: child for key, child in children}
    return blocks


def find_stage_blocks(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return those of a model's blocks that are still in it, after the others were left to other stages."""
    kept = {id(module) for module in model.modules()}
    return {name: block for name, block in blocks.items() if id(block) in kept}


def _are_layers(children: list[tuple[str, nn.Module]]) -> bool:
    modules = [child for _, child in children]
    if not all(next(child.parameters(), None) is not None for child in modules):
        return False
    return len({type(child) for child in modules}) == 1 or all(next(child.children(), None) for child in modules)
