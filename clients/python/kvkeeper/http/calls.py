"""One call of a client: its body, the key that it showed, and the engine that it is for."""

from dataclasses import dataclass

from kvkeeper.http.engines import Engine, Engines
from kvkeeper.http.errors import HttpError
from kvkeeper.http.pictures import refuse_pictures


@dataclass(frozen=True, slots=True)
class Call:
    """key: the bearer token; empty: none was shown."""

    engines: Engines
    body: bytes
    key: str

    async def engine(self, model: str | None, said: object = None, where: str = "messages") -> Engine:
        """The engine, which serves this model; None: whatever it serves.

        said: messages of the request, as they came; where: their field.

        Raises HttpError, KvkeeperError.
        """
        engine = await self.engines.find(self.key)
        if model not in (None, engine.model.model_id):
            text = f"The model `{model}` does not exist; `{engine.model.model_id}` is served."
            raise HttpError(404, text, "model", "model_not_found")
        refuse_pictures(engine.model.text_part_of, said, where)
        return engine
