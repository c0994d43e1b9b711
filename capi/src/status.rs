//! What a call tells: its status, and the text of this thread's last error.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

use kvgate::engine::client::ClientError;
use kvgate::engine::direct::DirectError;
use kvgate::engine::rank::WorkerError;

/// `kvgate_status`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    Ok = 0,
    Argument = 1,
    Unreachable = 2,
    Refused = 3,
    Internal = 4,
}

/// An error of a call: its status and its text.
pub struct Failed(Status, String);

impl Failed {
    pub fn argument(what: impl Display) -> Self {
        Self(Status::Argument, what.to_string())
    }

    pub fn internal(what: impl Display) -> Self {
        Self(Status::Internal, what.to_string())
    }
}

impl From<DirectError> for Failed {
    fn from(error: DirectError) -> Self {
        let status = match &error {
            DirectError::Client(of) | DirectError::Worker(WorkerError::Client(of)) => match of {
                ClientError::Refused(_) => Status::Refused,
                _ => Status::Unreachable,
            },
            DirectError::Worker(_) => Status::Unreachable,
            _ => Status::Argument,
        };
        Self(status, error.to_string())
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Keeps the text for `kvgate_last_error`.
pub fn tell(text: &str) {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    LAST.with_borrow_mut(|last| *last = text);
}

/// Makes a call; neither an error nor a panic goes beyond it.
pub fn call(work: impl FnOnce() -> Result<(), Failed>) -> Status {
    // After a panic the caller is told, and nothing of what was under way is used again.
    let done = catch_unwind(AssertUnwindSafe(work));
    let done = done.unwrap_or_else(|_| {
        Err(Failed::internal(
            "kvgate panicked: please report it, with the line before",
        ))
    });
    match done {
        Ok(()) => Status::Ok,
        Err(Failed(status, text)) => {
            tell(&text);
            status
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn kvgate_last_error() -> *const c_char {
    LAST.with_borrow(|last| last.as_ptr())
}

#[unsafe(no_mangle)]
pub extern "C" fn kvgate_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    CStr::from_bytes_with_nul(VERSION.as_bytes()).map_or(std::ptr::null(), CStr::as_ptr)
}
