"""Tables and texts about an artifact that commands print, a file for each subject. They import neither torch nor a
compiler.
"""
