// The digest of the declarations of all exported functions, by interface.py. Loading compares it.

extern "C" {
extern const char kernel_interface[];
const char kernel_interface[] = KERNEL_INTERFACE;
}
