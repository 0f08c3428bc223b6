"""The C++ ops of the CPU: their build, their Python signatures and the memory they use."""
