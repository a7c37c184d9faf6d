"""Layer costs measured on this machine, or taken from execution traces. A model and a GPU, or ``.et`` files,
go in; a cost file that ``plan --costs`` reads comes out.
"""
