"""The models of a server by name. The name in a request is looked up in this order:

    1  a model's own name
    2  an alias                       coder = ["gpt-4o-mini"]
    3  an adapter of a model          coder:sql, or sql alone: the first model that has it
    4  a model created from a served one (`variants.py`)
    5  an alias with a wildcard       claude-sonnet-*; the longest matching one
    6  with --any-model-name: the default, which is the first model

Every model is behind a gate (`gate.py`), which loads it on the first request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from fnmatch import fnmatchcase

from tokenmill.engine.customized import CREATED
from tokenmill.engine.status import Health, ModelInfo
from tokenmill.errors import InvalidConfig, InvalidRequest, TokenmillError, UnknownModel
from tokenmill.server.body import shown
from tokenmill.server.gate import EngineGate, NotRead
from tokenmill.server.variants import FoundModel, Variant, adapter_variant, created_variant, weights_of
from tokenmill.store import Manifest, Store, find_created

WILDCARDS = "*?["


class ModelRegistry:
    """All models of a server. The first one is the default for requests that need not name a model."""

    def __init__(self, *gates: EngineGate, any_name: bool = False) -> None:
        """`any_name`: unknown names select the default model."""
        self._gates = list(gates)
        self._any_name = any_name

    @property
    def gates(self) -> list[EngineGate]:
        """The gates of all models, the default first."""
        return list(self._gates)

    @property
    def default(self) -> EngineGate:
        return self._gates[0]

    def add(self, gate: EngineGate) -> None:
        """Add a model to the server."""
        require_distinct([*self._gates, gate])
        self._gates.append(gate)

    def remove(self, gate: EngineGate) -> None:
        """Stop serving a model, which must be unloaded."""
        self._gates.remove(gate)

    # ── lookup ─────────────────────────────────────────────────────────────────────────────────────────

    def names(self) -> list[str]:
        """Return the names of all models. A model without a configured name raises Loading until it is loaded."""
        return [gate.name for gate in self._gates]

    def known(self) -> list[FoundModel]:
        """Return all models whose files were read, and those that were created from them."""
        return [gate for gate in self._gates if gate.known is not None] + list(self._variants())

    def listed(self) -> list[ModelInfo]:
        """Return the descriptions of all known models."""
        return [model.info for model in self.known()]

    async def read_all(self) -> None:
        """Read the files of all models that were not read yet. A model whose files can't be read stays unknown."""
        readers = [gate.read() for gate in self._gates if gate.known is None and gate.read is not None]
        for problem in await asyncio.gather(*readers, return_exceptions=True):
            if problem is not None and not isinstance(problem, TokenmillError):
                raise problem
        self.default.require_open()
        if self.default.read is None:
            self.default.reader  # noqa: B018  # raises the reason if there is none

    def find(self, name: str | None, *, is_required: bool = True) -> FoundModel:
        """Return the model that a request names. `is_required`: refuse a request without a name."""
        names = self.names()
        self.default.require_open()
        if name in names:
            return self._gates[names.index(name)]
        if name is not None and (found := self._by_other_name(name)) is not None:
            return found
        if self._any_name or (name is None and not is_required):
            return self.default
        hint = f"this server has {', '.join(names)}"
        if name is None:
            raise InvalidRequest("model is required", param="model", hint=hint)
        raise UnknownModel(f"the model {shown(name)} does not exist", param="model", hint=hint)

    def health(self) -> Health:
        """Return the health of the server: that of its only model, or a summary of several."""
        states = [gate.health() for gate in self._gates]
        if len(states) == 1 or states[0].state in ("draining", "loading"):
            return states[0]
        in_memory = sum(gate.loaded is not None for gate in self._gates)
        detail = f"{in_memory} of {len(states)} models in memory"
        return Health("dead" if all(one.state == "dead" for one in states) else "ready", detail)

    def is_live(self) -> bool:
        """Return False once every engine in memory was given up, so that only a restart of the server helps."""
        in_memory = [gate.health() for gate in self._gates if gate.loaded is not None]
        return not in_memory or not all(health.is_given_up for health in in_memory)

    def has_started(self) -> bool:
        """Return whether the first model was loaded once, or can be loaded on request."""
        return self.default.has_started

    # ── other names ────────────────────────────────────────────────────────────────────────────────────

    def _by_other_name(self, name: str) -> FoundModel | None:
        for gate in self._gates:
            if name in gate.aliases:
                return gate
        for gate, adapter in self._adapters():
            if name in (f"{gate.name}:{adapter}", adapter):
                return adapter_variant(gate, gate.info, adapter)
        created = find_created(name, Store())
        if created is not None:
            if (variant := self._variant_of(created)) is not None:
                return variant
            self._require_read()
        patterns = [(alias, gate) for gate in self._gates for alias in gate.aliases if has_wildcard(alias)]
        fitting = [(alias, gate) for alias, gate in patterns if fnmatchcase(name, alias)]
        return max(fitting, key=lambda entry: len(entry[0]))[1] if fitting else None

    def _adapters(self) -> Iterator[tuple[EngineGate, str]]:
        """Yield (gate, adapter) for all models whose files were read."""
        for gate in self._gates:
            for adapter in gate.known.adapters if gate.known is not None else ():
                if not adapter.startswith(CREATED):
                    yield gate, adapter

    def _variants(self) -> Iterator[Variant]:
        """Yield all variants: the adapters of served models, and the models created from them."""
        for gate, adapter in self._adapters():
            yield adapter_variant(gate, gate.info, adapter)
        for manifest in Store().manifests():
            if manifest.custom is not None and (variant := self._variant_of(manifest)) is not None:
                yield variant

    def _variant_of(self, manifest: Manifest) -> Variant | None:
        """Return a created model as a variant, if a served model has the weights that it was created from."""
        weights = weights_of(Store().path_of(manifest))
        for gate in self._gates:
            if gate.known is not None and gate.known.path is not None and weights_of(gate.known.path) == weights:
                return created_variant(gate, manifest)
        return None

    def _require_read(self) -> None:
        """Raise NotRead for a model whose files were not read: a created model may be based on it."""
        for gate in self._gates:
            if gate.known is None and gate.read is not None and gate.failure is None:
                raise NotRead(gate.name, gate.read)


def has_wildcard(alias: str) -> bool:
    return any(sign in alias for sign in WILDCARDS)


def require_distinct(gates: list[EngineGate]) -> None:
    """Refuse two models with the same name or alias."""
    seen: dict[str, str] = {}
    for gate in gates:
        for name in (gate.name, *gate.aliases):
            if name in seen:
                raise InvalidConfig(f"two models are called {name!r}: {seen[name]} and {gate.name}", param="aliases")
            seen[name] = gate.name
