"""C++ ops for CPUs: their build, their signatures and their wrappers."""
