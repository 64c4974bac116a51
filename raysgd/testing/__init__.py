"""For those who extend raysgd: suites that an extension must pass, run over raysgd's own as well.

`callback_suite`: callbacks. Needs pytest where it is used; nothing else of raysgd imports this package.
"""
