"""The commands of ``python -m fasop``, each a module with ``main(argv) -> status``."""
