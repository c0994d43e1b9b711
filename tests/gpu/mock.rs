//! The tests' own CUDA driver, from Rust: it fails, waits and counts as a test says.

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/gpu/mock");
/// A library that was built already: child processes get it, some with mistakes in it.
const LIBRARY: &str = "KVGATE_TEST_LIBCUDA";

/// The driver, as this test wants it. One test at a time has it.
pub struct Mock {
    _turn: MutexGuard<'static, ()>,
}

/// 0: what is given to a stream waits until something needs it. Others: chance decides.
pub const SEEDS: std::ops::Range<u64> = 0..40;

impl Mock {
    pub fn start(seed: u64) -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        load();
        let mock = Self { _turn: turn };
        mock.reset(seed);
        mock
    }

    /// And counts from zero.
    pub fn reset(&self, seed: u64) {
        let reset: extern "C" fn(u64) = function("mock_reset");
        reset(seed);
    }

    /// The nth call of `name` fails with this code of CUDA's.
    pub fn fail(&self, name: &str, nth: usize, code: i32) {
        let fail: extern "C" fn(*const c_char, c_long, c_int) = function("mock_fail");
        let name = CString::new(name).unwrap();
        fail(name.as_ptr(), nth as c_long, code);
    }

    pub fn skip_wait(&self, nth: usize) {
        let skip: extern "C" fn(c_long) = function("mock_skip_wait");
        skip(nth as c_long);
    }

    pub fn twist_launch(&self, nth: usize, at: usize, width: usize, by: i64) {
        let twist: extern "C" fn(c_long, usize, usize, c_long) = function("mock_twist_launch");
        twist(nth as c_long, at, width, by);
    }

    pub fn twist_copy(&self, nth: usize, field: usize, by: i64) {
        let twist: extern "C" fn(c_long, usize, c_long) = function("mock_twist_copy");
        twist(nth as c_long, field, by);
    }

    pub fn machine(&self, devices: i32, version: i32, memory_bytes: usize) {
        let machine: extern "C" fn(c_int, c_int, usize) = function("mock_machine");
        machine(devices, version, memory_bytes);
    }

    pub fn calls(&self, name: &str) -> usize {
        let calls: extern "C" fn(*const c_char) -> c_long = function("mock_calls");
        let name = CString::new(name).unwrap();
        calls(name.as_ptr()) as usize
    }

    pub fn waits(&self) -> usize {
        number("mock_waits") as usize
    }

    pub fn launches(&self) -> usize {
        number("mock_launches") as usize
    }

    pub fn copies(&self) -> usize {
        number("mock_copies") as usize
    }

    /// Rows of the nth transfer, and bytes of each.
    pub fn rows(&self, nth: usize) -> (usize, usize) {
        let of = |name| {
            let of: extern "C" fn(c_long) -> c_long = function(name);
            of(nth as c_long) as usize
        };
        (of("mock_rows"), of("mock_row_bytes"))
    }

    /// Bytes of host memory that are pinned.
    pub fn registered(&self) -> usize {
        number("mock_registered") as usize
    }
}

/// Everything that was given to any stream is done after this.
pub fn drain() {
    let drain: extern "C" fn() = function("mock_drain");
    drain();
}

fn number(name: &str) -> c_long {
    let function: extern "C" fn() -> c_long = function(name);
    function()
}

/// Of the library; it must have this type.
pub fn function<F: Copy>(name: &str) -> F {
    assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
    let symbol = CString::new(name).unwrap();
    // SAFETY: the handle is of a library that stays loaded; the callers name functions by their types in libcuda.cc.
    let found = unsafe { libc::dlsym(load() as *mut c_void, symbol.as_ptr()) };
    assert!(!found.is_null(), "{name} is not in the library");
    // SAFETY: as above, and it has the size of a pointer.
    unsafe { std::mem::transmute_copy(&found) }
}

/// Its handle. cudarc asks the loader for `libcuda.so`, and gets what is loaded under that name already.
fn load() -> usize {
    static HANDLE: OnceLock<usize> = OnceLock::new();
    *HANDLE.get_or_init(|| {
        let library = std::env::var_os(LIBRARY).map_or_else(|| build("kernels", None), PathBuf::from);
        let path = CString::new(library.to_str().unwrap()).unwrap();
        // SAFETY: a library of ours, with no initialisers but those of the C++ runtime.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        if handle.is_null() {
            // SAFETY: dlopen has just failed, so there is a message.
            let message = unsafe { CStr::from_ptr(libc::dlerror()) };
            panic!("{message:?}");
        }
        handle as usize
    })
}

/// Compiles it, with the kernels of `source` in place of the real ones.
pub fn build(name: &str, source: Option<&Path>) -> PathBuf {
    // Tests run side by side.
    static DRIVER: OnceLock<PathBuf> = OnceLock::new();
    let work = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("gpu-{}", std::process::id()));
    let driver = DRIVER.get_or_init(|| {
        std::fs::create_dir_all(&work).unwrap();
        let driver = work.join("libcuda.o");
        compile(&["-c", "libcuda.cc", "-o", driver.to_str().unwrap()]);
        driver
    });
    let library = work.join(format!("{name}.so"));
    let kernels = source.map(|path| format!("-DKERNEL_SOURCE=\"{}\"", path.display()));
    let mut arguments = vec![
        "-shared",
        "-Wl,-soname,libcuda.so",
        driver.to_str().unwrap(),
        "kernel.cc",
    ];
    arguments.extend(kernels.as_deref());
    arguments.extend(["-o", library.to_str().unwrap()]);
    compile(&arguments);
    library
}

fn compile(arguments: &[&str]) {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let status = Command::new(&compiler)
        .args(["-std=c++17", "-O1", "-g", "-fPIC", "-Wall", "-Wextra", "-Werror"])
        .args(["-Wno-unknown-pragmas", "-Wno-unused-parameter"])
        .args(arguments)
        .current_dir(SOURCES)
        .status();
    let status =
        status.unwrap_or_else(|error| panic!("can't run {compiler}: {error}; install a C++ compiler"));
    assert!(status.success(), "{compiler} {arguments:?}");
}

/// The variable that tells a child process its purpose. The tests that look for it do nothing without it.
pub const CHILD: &str = "KVGATE_TEST_GPU_CHILD";

/// Whether the test `name` fails in a process of its own (which may crash), told what it is for.
pub fn fails_in_child(name: &str, purpose: &str, library: Option<&Path>) -> bool {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([name, "--exact", "--quiet"]).env(CHILD, purpose);
    let library = library.map_or_else(shared_library, Path::to_path_buf);
    let output = child.env(LIBRARY, library).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        !output.status.success() || text.contains("1 passed"),
        "no test {name}: {text}"
    );
    !output.status.success()
}

fn shared_library() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| build("for-children", None)).clone()
}
