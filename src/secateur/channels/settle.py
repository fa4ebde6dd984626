"""Settle what can be cut: probe the graph, find the attributes that must follow a cut, and freeze what still fails.

An attribute that equals a number of channels may count them, or equal it by chance. It is tried only where the probe
fails at its module, or where the code parts an axis at a place that it may name, and kept only if the cut network then
runs and agrees, and does not without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import replace
from functools import cached_property
from itertools import combinations

from torch import Tensor

from secateur.channels.attributes import Border, Name, Place
from secateur.channels.groups import ChannelGraph
from secateur.channels.probe import Failure, Probe
from secateur.channels.subject import Subject
from secateur.channels.trace import Watch

Attribute = tuple[type, str]
"""An attribute of all modules of a class."""


def settle(
    watch: Watch, subject: Subject, build: Callable[..., ChannelGraph], say: Callable[[str], object]
) -> ChannelGraph:
    """The graph of what can be cut, with the attributes that follow; `build` makes it from assumed attributes."""
    search = Search(watch, subject, build, say)
    graph, failure = search.fix_failures()
    more = search.find_borders(graph)
    if more is not graph:
        graph, failure = more, Probe(subject, more, say).first_failure()
    if failure is None:
        return graph
    failures = Probe(subject, graph, say).failures()
    for group in graph.groups:
        if group.name in failures:
            for member in group.members:
                axis = watch.leaf(member.tensor).state.axes[member.axis]
                assert isinstance(axis, Tensor)
                watch.table.freeze(axis[member.indices.reshape(-1)], failures[group.name])
    return search.rebuild()


class Search:
    """Looks for attributes that count channels, one class of modules after the other."""

    def __init__(
        self, watch: Watch, subject: Subject, build: Callable[..., ChannelGraph], say: Callable[[str], object]
    ) -> None:
        self.watch = watch
        self.subject = subject
        self.say = say
        self.accepted: set[Attribute] = set()
        self._build = build
        self._built: dict[Set[Attribute], ChannelGraph] = {}
        self._modules = dict(subject.model.named_modules())

    @cached_property
    def candidates(self) -> dict[type, list[tuple[Name, Place]]]:
        """By class of modules the attributes that have the size of a place, and the places."""
        found: dict[type, list[tuple[Name, Place]]] = {}
        for place in self.watch.places:
            for name in place.names(self._modules):
                found.setdefault(type(self._modules[name.module]), []).append((name, place))
        return found

    def build(self, more: Iterable[Attribute] = ()) -> ChannelGraph:
        """The graph with what has been accepted, and these."""
        assumed = frozenset(self.accepted.union(more))
        if assumed not in self._built:
            self._built[assumed] = self._build_with(assumed)
        return self._built[assumed]

    def rebuild(self) -> ChannelGraph:
        """The graph with what has been accepted, after more has been frozen."""
        self._built.clear()
        return self.build()

    def _build_with(self, assumed: Set[Attribute]) -> ChannelGraph:
        listed = [
            (name, place)
            for kind, candidates in (self.candidates.items() if assumed else ())
            for name, place in candidates
            if (kind, name.attribute) in assumed
        ]
        return self._build(assumed=listed)

    def _probe(self, graph: ChannelGraph) -> Probe:
        return Probe(self.subject, graph, self.say)

    def _attributes(self, kind: type) -> list[Attribute]:
        return list(dict.fromkeys((kind, name.attribute) for name, _ in self.candidates[kind]))

    def fix_failures(self) -> tuple[ChannelGraph, Failure | None]:
        """Accept attributes for the classes at which the probe fails; the graph, and what still goes wrong."""
        tried: list[type] = []
        while True:
            graph = self.build()
            failure = self._probe(graph).first_failure()
            untried = [kind for kind in self.candidates if kind not in tried] if failure is not None else []
            if failure is None or not untried:
                return graph, failure
            # What differs names no class.
            tried.append(next((kind for kind in self._classes(failure) if kind in untried), untried[0]))
            self.accepted |= self._follow(tried[-1], [kind for kind in untried if kind is not tried[-1]])

    def _classes(self, failure: Failure) -> list[type]:
        """The class of the module at which the probe failed, then of those around it."""
        path, found = failure.module, list[type]()
        while path is not None:
            found.append(type(self._modules[path]))
            path = path.rpartition(".")[0] if path else None
        return list(dict.fromkeys(found))

    def _follow(self, kind: type, untried: Iterable[type]) -> Set[Attribute]:
        """The fewest attributes of a class that must follow for what is counted there to be cut.

        untried: classes whose attributes may have to follow, too, before anything works.
        """
        for base in self._bases(untried):
            found = fewest(self._attributes(kind), lambda chosen, base=base: self._works(kind, base | chosen))
            if found is not None:
                return found
        return set()

    def _bases(self, others: Iterable[type]) -> list[Set[Attribute]]:
        """Nothing, and all attributes of other classes."""
        more = {attribute for other in others for attribute in self._attributes(other)}
        return [set(), more] if more else [set()]

    def _works(self, kind: type, attributes: Set[Attribute]) -> bool:
        """Whether what the class counts can be cut with these."""
        graph = self.build(attributes)
        return self._probe(graph).works(graph.channels_at(place.codes for _, place in self.candidates[kind])) is None

    def find_borders(self, graph: ChannelGraph) -> ChannelGraph:
        """Accept attributes that say where an axis is parted; the graph, which then has more channels."""
        for kind, candidates in self.candidates.items() if self.watch.borders else ():
            places = {place for _, place in candidates}
            borders = [border for border in self.watch.borders if border.is_known(places)]
            if borders and (found := self._open(kind, borders, graph)):
                self.accepted |= found
                graph = self.build()
        return graph

    def _open(self, kind: type, borders: list[Border], graph: ChannelGraph) -> Set[Attribute]:
        """The fewest attributes of a class with which more can be cut; with those of others that then must follow."""
        others = [other for other in self.candidates if other is not kind]
        for base in self._bases(others):
            listed = self._attributes(kind)
            found = fewest(listed, lambda chosen, base=base: self._opens(borders, graph, base, chosen))
            if found is not None:
                for other in others if base else ():
                    more = self._attributes(other)
                    found = found | (fewest(more, lambda chosen, o=other, f=found: self._works(o, f | chosen)) or set())
                return found
        return set()

    def _opens(
        self, borders: list[Border], graph: ChannelGraph, base: Set[Attribute], attributes: Set[Attribute]
    ) -> bool:
        """Whether more can be cut with these attributes than in the graph, and cannot if they stay what they are."""
        more = self.build(base | attributes)
        channels = more.channels_at(border.codes for border in borders)
        if more.num_channels <= graph.num_channels or self._probe(more).works(channels) is not None:
            return False
        rest = [a for a in more.attributes if (type(self._modules[a.module]), a.attribute) not in attributes]
        return self._probe(replace(more, attributes=tuple(rest))).works(channels) is not None


def fewest(listed: list[Attribute], works: Callable[[Set[Attribute]], bool]) -> Set[Attribute] | None:
    """The fewest attributes with which it works: none, one, or all that are needed; None if it never does."""
    for chosen in ((), *combinations(listed, 1)):
        if works(set(chosen)):
            return set(chosen)
    left = set(listed)
    if works(left):
        for attribute in listed:
            left = left - {attribute} if works(left - {attribute}) else left
        return left
    # One that equals a width by chance may stand in the way.
    pairs = combinations(listed, 2) if len(listed) > 2 else ()
    return next((set(chosen) for chosen in pairs if works(set(chosen))), None)
