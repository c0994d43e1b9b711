//! The library's name for the linker, whose number changes with the ABI, and what it exports.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libkvgate.so.0");
    // A dependency has a C API of its own, which is none of ours.
    println!("cargo::rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
    println!("cargo::rerun-if-changed=build.rs");
}
