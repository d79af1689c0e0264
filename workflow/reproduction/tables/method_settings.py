"""Settings of methods by their names, as configurations and tables have them: each is validated by its method."""

from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from reproduction.reading.written import by_name, some_of
from rotquant.recipes.recipe import find_method, settings_by_name
from rotquant.recipes.registry import method_names


class MethodSettings:
    """Annotation for settings of methods by method name, each validated by its method."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The validation schema; only named methods are imported. A null is kept: a recipe removes a method by it."""
        return core_schema.no_info_before_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The JSON schema of the settings of every method."""
        every = by_name("Methods", {name: find_method(name) | None for name in method_names()})
        return handler(TypeAdapter(Annotated[dict[str, Any], some_of(every)]).core_schema)

    @staticmethod
    def _checked(data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        found = settings_by_name(data, lambda method: Annotated[dict[str, Any], some_of(method)])
        return found | {name: None for name in data if name not in found and find_method(name)}
