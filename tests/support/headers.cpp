// Nothing: the precompiled headers of tests need a file of their own.
