"""How the small models that ship with the project were made: recipes in config/training/ and config/finetuning/."""
