use super::error::CliError;
use super::output::Out;
use clap::Args;
/// TODO
#[derive(Debug, Args)]
pub struct VerifyArgs {}
pub async fn run(_: VerifyArgs, _: u8, _: &mut Out) -> Result<(), CliError> {
    Ok(())
}
