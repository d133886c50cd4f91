"""What the commands show, a file for each subject. They import neither torch nor a compiler."""
