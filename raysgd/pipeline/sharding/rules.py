"""`ShardingRules`: how parameters are sharded, to read, print, change and pass on. Any process, no JAX."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from raysgd._util.text import with_article
from raysgd.errors import ConfigError

if TYPE_CHECKING:
    from raysgd.pipeline.sharding.plan import ShardingPlan


class ShardingRules(list[Any]):
    """A list of rules (regular expression, spec), one for each parameter. Its text is a table with the reasons.

    Rules that are changed or added count as own rules, which must fit. The others are decided again where they are used.
    """

    def __init__(self, plan: ShardingPlan) -> None:
        super().__init__(plan.rules)
        self._table = str(plan)
        self._decided = tuple(plan.rules)

    def __str__(self) -> str:
        return self._table

    @property
    def own(self) -> list[Any]:
        """The rules that are not as they were decided."""
        return [rule for rule in self if rule not in self._decided]


def own_rules(rules: Iterable[Any] | None) -> list[Any] | None:
    """Return the rules of the user among ``params_sharding_rules``.

    Raises:
        ConfigError: The argument is not a list.
    """
    if rules is None:
        return None
    if isinstance(rules, ShardingRules):
        return rules.own
    if not isinstance(rules, (list, tuple)):
        raise ConfigError(
            f"params_sharding_rules is {with_article(type(rules).__name__)}; give deployer.get_sharding_rules(params), or a list "
            "of (regular expression, PartitionSpec)."
        )
    return list(rules)
