//! `dlq export`: letters with everything in them, one JSON object a line.

use std::{
    fs::{self, File},
    io::{BufWriter, Write},
    path::{Path, PathBuf},
};

use super::{Letters, indexing};
use crate::{
    arguments::{Connection, Export},
    failure::Failure,
    text,
};

pub fn run(export: &Export, connection: &Connection, out: &mut impl Write) -> Result<(), Failure> {
    if export.into.print_template {
        return indexing::print_template(export, out);
    }
    if let Some(url) = &export.into.elasticsearch {
        return indexing::run(export, connection, url);
    }
    let letters = Letters::open(connection, &export.source, &export.which)?;
    let spans = letters.spans();
    let mut count = 0_u64;
    let mut write = |to: Option<&mut dyn Write>| {
        let mut to = to;
        letters.each(&spans, "exporting", |letter| {
            count += 1;
            if let Some(to) = &mut to {
                writeln!(to, "{}", text::json_line(&letter.whole()))?;
            }
            Ok(())
        })?;
        Ok::<_, Failure>(())
    };
    match &export.to {
        _ if export.dry_run => write(None)?,
        Some(path) => {
            let part = beside(path);
            let at = |error| Failure::File {
                path: part.clone(),
                error,
            };
            let mut file = BufWriter::new(File::create(&part).map_err(at)?);
            let written = write(Some(&mut file)).map_err(|failure| match failure {
                Failure::Output(error) => at(error),
                other => other,
            });
            let kept = written.and_then(|()| {
                let file = file.into_inner().map_err(|error| at(error.into_error()))?;
                file.sync_all().map_err(at)?;
                fs::rename(&part, path).map_err(at)
            });
            if kept.is_err() {
                // A part of it would look like all of it.
                let _ = fs::remove_file(&part);
            }
            kept?;
        }
        None => write(Some(out))?,
    }
    let would = if export.dry_run { "would be " } else { "" };
    eprintln!("{count} letters {would}exported");
    Ok(())
}

fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".part");
    name.into()
}
