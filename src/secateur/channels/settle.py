"""Settle what can be cut: probe the graph, find the attributes that must follow a cut, and freeze what still fails.

An attribute that equals a number of channels may count them, or equal it by chance. It is tried only where the probe
fails at its module, or where the code parts an axis at a place that it may name, and kept only if the cut network then
runs and agrees, and does not without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import chain, combinations

from torch import Tensor, nn

from secateur.channels.attributes import Border, Name, Place
from secateur.channels.groups import ChannelGraph
from secateur.channels.probe import Failure, Probe
from secateur.channels.trace import Watch

Names = frozenset[str]
"""Names of attributes of one class of modules."""


def settle(
    watch: Watch, model: nn.Module, build: Callable[..., ChannelGraph], say: Callable[[str], None]
) -> ChannelGraph:
    """The graph of what can be cut, with the attributes that follow; `build` makes it from assumed attributes."""
    search = Search(watch, model, build, say)
    graph, failure = search.fix_failures()
    more = search.find_borders(graph)
    if more is not graph:
        graph, failure = more, Probe(model, more, say).first_failure()
    if failure is None:
        return graph
    failures = Probe(model, graph, say).failures()
    for group in graph.groups:
        if group.name in failures:
            for member in group.members:
                axis = watch.leaf(member.tensor).state.axes[member.axis]
                assert isinstance(axis, Tensor)
                watch.table.freeze(axis[member.indices.reshape(-1)], failures[group.name])
    return search.build()


class Search:
    """Looks for attributes that count channels, one class of modules after the other."""

    def __init__(
        self, watch: Watch, model: nn.Module, build: Callable[..., ChannelGraph], say: Callable[[str], None]
    ) -> None:
        self.watch = watch
        self.model = model
        self.say = say
        self.accepted: set[tuple[type, str]] = set()
        self._build = build
        self._modules = dict(model.named_modules())

    @cached_property
    def candidates(self) -> dict[type, list[tuple[Name, Place]]]:
        """By class of modules the attributes that have the size of a place, and the places."""
        found: dict[type, list[tuple[Name, Place]]] = {}
        for place in self.watch.places:
            for name in place.names(self._modules):
                found.setdefault(type(self._modules[name.module]), []).append((name, place))
        return found

    def build(self, kind: type | None = None, attributes: Iterable[str] = ()) -> ChannelGraph:
        """The graph with what has been accepted, and these attributes of this class."""
        assumed = self.accepted | {(kind, attribute) for attribute in attributes if kind is not None}
        listed = chain.from_iterable((((kind, n.attribute), n, p) for n, p in c) for kind, c in self.candidates.items())
        return self._build(assumed=[(name, place) for key, name, place in listed if key in assumed])

    def fix_failures(self) -> tuple[ChannelGraph, Failure | None]:
        """Accept attributes for the classes at which the probe fails; the graph, and what still goes wrong."""
        untried = dict.fromkeys(self.candidates)
        while True:
            graph = self.build()
            failure = Probe(self.model, graph, self.say).first_failure()
            kind = next((kind for kind in self._classes(failure) if kind in untried), None) if failure else None
            if kind is None:
                break
            del untried[kind]
            self._accept(kind, self._follow(kind, untried))
        before = len(self.accepted)
        for kind in untried if failure else ():
            self._accept(kind, self._follow(kind, {}))
        return (graph, failure) if len(self.accepted) == before else self._retried()

    def _retried(self) -> tuple[ChannelGraph, Failure | None]:
        graph = self.build()
        return graph, Probe(self.model, graph, self.say).first_failure()

    def _accept(self, kind: type, attributes: Iterable[str]) -> None:
        self.accepted |= {(kind, attribute) for attribute in attributes}

    def _classes(self, failure: Failure) -> Iterator[type]:
        """The class of the module at which the probe failed, then of those around it."""
        path = failure.module
        while path is not None:
            yield type(self._modules[path])
            path = path.rpartition(".")[0] if path else None

    def _follow(self, kind: type, untried: Iterable[type]) -> Names:
        """The fewest attributes of a class that must follow for what is counted there to be cut."""
        listed = list(dict.fromkeys(name.attribute for name, _ in self.candidates[kind]))
        for chosen in chain.from_iterable(combinations(listed, count) for count in range(min(2, len(listed)) + 1)):
            if self._works(kind, chosen, untried):
                return frozenset(chosen)
        chosen = frozenset(listed)
        if len(listed) < 3 or not self._works(kind, chosen, untried):
            return frozenset()
        for attribute in listed:
            if self._works(kind, chosen - {attribute}, untried):
                chosen -= {attribute}
        return chosen

    def _works(self, kind: type, attributes: Iterable[str], untried: Iterable[type]) -> bool:
        """Whether what the class counts can be cut with these; if not here, then at another class that is untried."""
        graph = self.build(kind, attributes)
        channels = graph.channels_at([place.codes for _, place in self.candidates[kind]])
        failure = Probe(self.model, graph, self.say).works(channels)
        if failure is None:
            return True
        first = next((each for each in self._classes(failure) if each is kind or each in untried), None)
        return first is not None and first is not kind

    def find_borders(self, graph: ChannelGraph) -> ChannelGraph:
        """Accept attributes that say where an axis is parted; the graph, which has more channels then."""
        for kind, candidates in self.candidates.items():
            places = {place for _, place in candidates}
            borders = [border for border in self.watch.borders if border.is_known(places)]
            if borders:
                graph = self._find_borders(graph, kind, borders)
        return graph

    def _find_borders(self, graph: ChannelGraph, kind: type, borders: list[Border]) -> ChannelGraph:
        listed = list(dict.fromkeys(name.attribute for name, _ in self.candidates[kind]))
        subsets = chain(combinations(listed, 1), combinations(listed, 2), [listed] if len(listed) > 2 else [])
        for chosen in subsets:
            more = self.build(kind, chosen)
            if more.num_channels <= graph.num_channels:
                continue
            channels = more.channels_at([border.codes for border in borders])
            without = self._without(more, kind, chosen)
            if Probe(self.model, without, self.say).works(channels) is None:
                continue
            if Probe(self.model, more, self.say).works(channels) is None:
                self._accept(kind, chosen)
                return more
        return graph

    def _without(self, graph: ChannelGraph, kind: type, attributes: Iterable[str]) -> ChannelGraph:
        """The same graph, in which these attributes stay what they are."""
        names = {name for name, _ in self.candidates[kind] if name.attribute in attributes}
        rest = [a for a in graph.attributes if Name(a.module, a.attribute, a.position) not in names]
        return replace(graph, attributes=tuple(rest))
