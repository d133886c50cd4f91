"""The views that the commands print, a file for each subject. They import neither torch nor a compiler."""
