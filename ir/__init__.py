"""The intermediate representation: ops, types, programs, their text, the verifier and the interpreter."""
