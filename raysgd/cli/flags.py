"""Flags of commands, on click: what click has no word for.

A switch may stand alone for True, or have ``true`` or ``false`` after it. A flag may be given once. The flags of a command that
runs another program end at the first word that is neither a flag nor its value; click leaves the words from there on alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from raysgd.config.argument_names import nearest

_GIVEN = click.core.ParameterSource.COMMANDLINE


class Parsed(click.ParamType):  # type: ignore[type-arg]  # older versions of click have no type arguments
    """The type of click for a function that parses a text, and raises a `ConfigError` or another ValueError."""

    def __init__(self, parse: Callable[[str], Any], metavar: str) -> None:
        self.name = metavar
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value)
        except ValueError as error:  # a ConfigError is one, too
            self.fail(f"{value}: {str(error).rstrip('.')}.", param, ctx)


class Flag(click.Option):
    """A flag ``--name value`` or ``--name=value``.

    Args:
        name: The name with its dashes.
        help: What it does, for ``--help``.
        parse: Makes the value of the text, and raises a `ConfigError` or another ValueError; or a type of click.
        metavar: The value in ``--help``.
        is_switch: The flag may stand alone for True; a word of ``metavar``, such as ``true|false``, may follow.
        may_repeat: The values of all occurrences are a tuple.
        group: The heading in ``--help``.
    """

    def __init__(
        self,
        name: str,
        *,
        help: str,
        parse: Any = str,
        metavar: str = "TEXT",
        is_switch: bool = False,
        may_repeat: bool = False,
        group: str = "Options",
    ) -> None:
        super().__init__(
            [name.lstrip("-").replace(".", "_").replace("-", "_"), name],
            help=help,
            type=parse if isinstance(parse, click.ParamType) else Parsed(parse, metavar),
            metavar=f"[{metavar}]" if is_switch else metavar,
            multiple=may_repeat,
        )
        self.flag = name
        self.is_switch = is_switch
        self._words = metavar.split("|")
        self.group = group

    def take(self, following: Sequence[str]) -> tuple[list[str], int]:
        """Return the flag with its value, which is the following word or that of a switch, and how many words it takes."""
        if self.is_switch and not (following and following[0].lower() in self._words):
            return [self.flag, "true"], 1
        return ([self.flag, *following], 2) if following else ([], 1)


class FieldsCommand(click.Command):
    """A command that has fields of a file as flags, in addition to its own.

    A word after such a flag is its value, also if it begins with one dash; click would take that for short options.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words after the command's name; see `click.Command.parse_args`.

        Raises:
            click.UsageError: A flag of the command cannot be parsed, or is given twice.
        """
        own = {name: each for each in self.get_params(ctx) if isinstance(each, click.Option) for name in each.opts}
        words: list[str] = []
        found: list[click.Option] = []
        place = 0
        while place < len(args):
            word, following = args[place], args[place + 1 : place + 2]
            flag = own.get(word.partition("=")[0])
            if flag is not None:
                if flag in found and not flag.multiple:
                    raise click.UsageError(f"{word.partition('=')[0]} is given twice.", ctx)
                found.append(flag)
                has_value = not flag.is_flag and "=" not in word
                words += [word, *following] if has_value else [word]
            else:
                has_value = word.startswith("--") and word != "--" and "=" not in word and not word.endswith("!")
                has_value = has_value and not any(each.startswith("--") or each in own for each in following)
                words.append("=".join([word, *following]) if has_value else word)
            place += 2 if has_value else 1
        return super().parse_args(ctx, words)


class FlagsCommand(click.Command):
    """A command whose flags end at its first other word, so that the words from there on can be those of a program.

    Args:
        *args: As for `click.Command`.
        hints: What to give in place of flags of other programs, by their names.
        advice: What to say of a flag that is like none.
        program_flags: Words with dashes with which the program begins, as Python's ``-m``.
        **kwargs: As for `click.Command`.
    """

    def __init__(
        self, *args: Any, hints: Mapping[str, str], advice: str = "", program_flags: Sequence[str] = (), **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._program_flags = frozenset(program_flags)
        self.allow_interspersed_args = False
        self._hints = hints
        self._advice = advice

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words after the command's name; see `click.Command.parse_args`.

        Raises:
            click.UsageError: A flag does not exist, has no value, cannot be parsed or is given twice.
        """
        words = args if ctx.resilient_parsing else self._completed(ctx, args)  # a shell completes an unfinished line
        return super().parse_args(ctx, words)

    def given(self, ctx: click.Context) -> dict[str, Any]:
        """Return the values of the flags that were given, by name with dashes."""
        return {
            param.flag: ctx.params[param.name]
            for param in self.params
            if isinstance(param, Flag) and param.name and ctx.get_parameter_source(param.name) is _GIVEN
        }

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under the headings of their groups."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                groups.setdefault(param.group if isinstance(param, Flag) else "Options", []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)

    def merge(self, words: Sequence[str], changes: Sequence[str], without: Sequence[str] = ()) -> list[str]:
        """Return a command line with these flags in place of those that it has, and without some.

        Args:
            words: A command line of this command, after the command's name.
            changes: Flags alone.
            without: Names of flags to leave out.

        Raises:
            click.UsageError: A flag cannot work, or ``changes`` has other words.
        """
        new, others = self._split(None, changes)
        if others:
            raise click.UsageError(f"{others[0]} is not a flag; the script and its arguments are those of the run.")
        old, program = self._split(None, words)
        replaced = {name for name, _ in new} | set(without)
        kept = [token for name, tokens in old if name not in replaced for token in tokens]
        return [*(token for _, tokens in new for token in tokens), *kept, *program]

    def _completed(self, ctx: click.Context, words: Sequence[str]) -> list[str]:
        """Return the words with the value of each switch."""
        flags, others = self._split(ctx, words)
        mark = (
            ["--"] if others and others[0] in self._program_flags else []
        )  # so that click does not take it for a flag
        return [*(token for _, tokens in flags for token in tokens), *mark, *others]

    def _split(
        self, ctx: click.Context | None, words: Sequence[str]
    ) -> tuple[list[tuple[str, Sequence[str]]], list[str]]:
        """Split the words into flags, by name and with their values, and the words after them.

        It checks what click accepts, or explains without the names that the user may have meant.
        """
        known = {param.flag: param for param in self.params if isinstance(param, Flag)}
        found: list[tuple[str, Sequence[str]]] = []
        place = 0
        ends = {"--", "-h", "--help", *self._program_flags}
        while place < len(words) and words[place].startswith("-") and words[place] not in ends:
            name, has_value, _ = words[place].partition("=")
            if (flag := known.get(name)) is None:
                raise click.UsageError(self._explain(name, known), ctx)
            if not flag.multiple and name in (earlier for earlier, _ in found):
                raise click.UsageError(f"{name} is given twice.", ctx)
            tokens, num_taken = ([words[place]], 1) if has_value else flag.take(words[place + 1 : place + 2])
            if not tokens or (num_taken == 2 and not flag.is_switch and tokens[1].partition("=")[0] in known):
                raise click.UsageError(f"{name} needs a value: {name} {flag.metavar}.", ctx)
            found.append((name, tokens))
            place += num_taken
        return found, list(words[place:])

    def _explain(self, name: str, known: Mapping[str, Flag]) -> str:
        plain = name.lower().replace("_", "-")
        if plain in self._hints:
            return f"{name} is not known: {self._hints[plain]}."
        return f"{name} is not known{nearest(plain, known)}; {self._advice or '--help lists the flags'}."
