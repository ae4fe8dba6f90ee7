//! Commands and options, with all that `--help` says.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::{
    elasticsearch::IndexName,
    filter::{HeaderWanted, header_wanted, key_wanted},
    place::Place,
    time::{self, Moment},
};

const CODES: &str = "\
Exit codes:
  0  done; also where there was nothing to do
  1  failed: brokers, permissions, files
  2  wrong usage
  3  what was named does not exist: a topic, an open letter, commits of a group
  4  not confirmed, and nothing was changed
  5  done in part: see what was said on the way
  6  `lag --max-age`: a partition is further behind than that";

/// For whoever is woken at night: what failed, why, and sending it back; and where a group stands.
///
/// Dead letters are records that a consumer has given up. A dead-letter topic is a log: what has been dealt with stays in
/// it until retention deletes it. What the redriver's group is done with counts as done here, all else as open.
#[derive(Debug, Parser)]
#[command(name = "reliable-consumer", version, after_help = CODES, disable_help_subcommand = true)]
pub struct Arguments {
    #[command(flatten)]
    pub connection: Connection,

    /// How results are written: for people, or for scripts as JSON, one object a line
    #[arg(
        long,
        short,
        global = true,
        value_enum,
        default_value = "table",
        value_name = "FORMAT"
    )]
    pub output: Format,

    #[command(subcommand)]
    pub command: Command,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Tables and indented text
    Table,
    /// One JSON object a line, complete, nothing cut
    Json,
}

/// How to reach the cluster. What stands on the command line wins over variables: --brokers over --property over --config
/// over KAFKA_BROKERS over KAFKA_PROPERTY_… over the file that RELIABLE_CONSUMER_CONFIG names.
#[derive(Args, Debug)]
#[command(next_help_heading = "Connection")]
pub struct Connection {
    /// Brokers to begin with, as host:port,host:port [env: KAFKA_BROKERS, unless --property or --config name some]
    #[arg(long, short, global = true, value_name = "LIST")]
    pub brokers: Option<String>,

    /// A file of librdkafka properties, `name=value` a line, `#` for comments. The place for passwords. It wins over
    /// variables [env: RELIABLE_CONSUMER_CONFIG, over which other variables win]
    #[arg(long, short, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// A librdkafka property; wins over --config. May be repeated. Also as a variable, over which --config wins:
    /// KAFKA_PROPERTY_SASL_USERNAME is sasl.username. Others can see what stands on a command line: write secrets into the
    /// file or a variable
    #[arg(long, short = 'X', global = true, value_name = "NAME=VALUE")]
    pub property: Vec<Property>,

    /// How long brokers may take for an answer, e.g. 10s
    #[arg(long, global = true, value_name = "TIME", default_value = "15s", value_parser = time::duration)]
    pub timeout: Duration,
}

/// A property; its value may be a secret, and is not shown.
#[derive(Clone)]
pub struct Property {
    pub name: String,
    /// `None`, if there is no `=`. That is said later: what is wrong here would be quoted, and may be a password.
    pub value: Option<String>,
}

impl std::fmt::Debug for Property {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Property")
    }
}

impl From<String> for Property {
    fn from(text: String) -> Self {
        match text.split_once('=') {
            Some((name, value)) => Self {
                name: name.trim().into(),
                value: Some(value.into()),
            },
            None => Self {
                name: text,
                value: None,
            },
        }
    }
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Dead letters: see them, count them, move them
    #[command(subcommand, after_help = CODES)]
    Dlq(Dlq),
    /// Where a group stands: how far behind, what holds it up, and what is finished behind that
    ///
    /// It reads what the group has committed and joins nothing. A consumer of this library notes beside its committed
    /// offset which later records it has finished. The record at that offset, the head, is the oldest that is not
    /// finished: it is fetched and named, with its age. `HELD BACK` counts offsets behind it that are finished and cannot
    /// be committed because of it. A head that stays the same while that number grows holds the partition up; look at it
    /// with `dlq show TOPIC PARTITION@OFFSET`, which shows any record of any topic. `OWNER` is the member that the partition
    /// is assigned to, by its client.id and host; `--members` lists all members, also those that have nothing.
    #[command(after_help = CODES)]
    Lag(Lag),
    /// Topics for dead letters
    #[command(subcommand, after_help = CODES)]
    Topics(Topics),
    /// Prints a script that completes commands and options in a shell
    ///
    /// For example: reliable-consumer completions bash > /etc/bash_completion.d/reliable-consumer
    Completions {
        /// Whose
        shell: clap_complete::Shell,
    },
}

#[derive(Debug, Subcommand)]
pub enum Dlq {
    /// What failed, newest first
    ///
    /// One line a letter: when it failed, where the letter is, where its record came from, why it was given up, how often
    /// it has been sent back. `dlq show` tells all about one.
    #[command(after_help = CODES)]
    List(List),
    /// One letter with everything in it: its story, its headers, its payload
    ///
    /// A payload that is JSON is indented; one that is not text is shown in hexadecimal. Control characters are escaped,
    /// so that what somebody wrote into a record cannot change what is on your terminal.
    #[command(after_help = CODES)]
    Show(Show),
    /// How many letters, by topic, kind, hour, number of redrives, group, and message
    #[command(after_help = CODES)]
    Stats(Stats),
    /// Letters as JSON, one a line, complete with key, value and headers; or into Elasticsearch, for statistics
    ///
    /// Text is written as {"text": …}, what is not UTF-8 as {"base64": …}. Letters of a partition come in their order.
    ///
    /// With --elasticsearch each letter becomes a document whose id is TOPIC:PARTITION:OFFSET, so that a repeat overwrites
    /// it. Letters that have been dealt with are exported as well: they were failures all the same. How far the export has
    /// come is kept as the committed offsets of a group, and the next run goes on from there, after a crash too. If the
    /// index does not exist, its template is put first, and all letters are written from the beginning.
    ///
    /// A server that is away or has too much to do is waited for. A letter that does not fit the index is named and passed
    /// over, and the exit code is 5.
    #[command(after_help = CODES)]
    Export(Box<Export>),
    /// Sends letters back to the topics that their records came from
    ///
    /// Each record goes back with its key, value, headers and `messageId`, and a `retryCount` one higher; one that has been
    /// back as often as --threshold says goes to the parking lot. Only topics that are named with --to are sent to: where a
    /// letter comes from is what its headers say, and anybody can write headers. What names another topic is parked. Of a
    /// topic that ends in `.parked` the letters begin anew with `retryCount` 1, and what cannot be sent stays.
    ///
    /// It deals with the letters that are there when it begins, and ends. It asks before it deals with more than 100, and
    /// on a terminal also before it parks what --to does not allow; a --to that does not exist is code 3.
    ///
    /// With --follow it goes on until it is stopped, as a service, which has nobody to ask: all letters that are open go
    /// back, however many. It waits before each record goes back, longer each time, and says once a minute what it has done,
    /// if it has done anything.
    ///
    /// A letter is done when all in-sync replicas have the record. It
    /// can be interrupted and run again: what is done is noted, and nothing is lost. Records that were sent and not noted
    /// before a crash are sent again, with the same `messageId`.
    ///
    /// What a run with a filter has done is noted for the redriver's group too, if nobody is at work in it; otherwise that
    /// is said, and that redriver will send it again.
    #[command(after_help = CODES)]
    Redrive(Redrive),
    /// Moves single letters to the parking lot, for people to look at
    ///
    /// The letter is copied to the parking lot. When all in-sync replicas have the copy, it is noted for the redriver's
    /// group that the letter is done, so that the redriver passes over it. A record cannot be deleted from a topic: the
    /// letter stays in the dead-letter topic, and is not open any more. Only an idle group can be noted something for: stop
    /// the redriver first; otherwise nothing is changed. Killed in between, the command leaves a copy, and the letter open.
    #[command(after_help = CODES)]
    Park(Park),
    /// Moves single letters from the parking lot back to the dead-letter topic
    ///
    /// As `dlq park`, the other way round. The letter begins anew with `retryCount` 0, or the redriver would park it again;
    /// it is the same message, with the same `messageId`. That it has left is noted for the group
    /// `<PARKING_LOT>.redriver`, by which `dlq list` tells what is still parked.
    #[command(after_help = CODES)]
    Unpark(Unpark),
}

#[derive(Args, Debug)]
pub struct Source {
    /// The topic that the letters are in: a dead-letter topic or a parking lot
    pub topic: String,

    /// The group whose commits tell which letters are done [default: <TOPIC>.redriver]
    #[arg(long, value_name = "GROUP")]
    pub redriver_group: Option<String>,
}

impl Source {
    pub fn group(&self) -> String {
        self.redriver_group
            .clone()
            .unwrap_or_else(|| format!("{}.redriver", self.topic))
    }
}

/// Which letters are meant.
#[derive(Args, Debug, Default)]
#[command(next_help_heading = "Which letters")]
pub struct Which {
    /// Letters that are done too
    #[arg(long)]
    pub all: bool,

    #[command(flatten)]
    pub filter: Filter,
}

/// Letters that meet all of these. Of several topics, kinds and keys one is enough.
#[derive(Args, Debug, Default)]
#[command(next_help_heading = "Which letters")]
pub struct Filter {
    /// The topic that the record was in first. May be repeated
    #[arg(long, value_name = "TOPIC")]
    pub origin: Vec<String>,

    /// Why it was given up: permanent, attempts-exhausted, timeout, panic, undecodable, crashed, stuck, untrusted,
    /// key-held, id-conflict, out-of-time, interrupted; or the class of an exception, with its package or without. Case matters. May be repeated
    #[arg(long, value_name = "KIND")]
    pub kind: Vec<String>,

    /// Failed at this time or later: 2h (ago), 2026-11-29T03:00:00Z, 2026-11-29 (UTC)
    #[arg(long, value_name = "TIME", value_parser = time::moment)]
    pub since: Option<Moment>,

    /// Failed before this time
    #[arg(long, value_name = "TIME", value_parser = time::moment)]
    pub until: Option<Moment>,

    /// The record's key, as text, or as hex:0a0b. May be repeated
    #[arg(long, value_name = "KEY", value_parser = key_wanted)]
    pub key: Vec<Vec<u8>>,

    /// A header, with this value or with any. May be repeated; all are needed
    #[arg(long, value_name = "NAME[=VALUE]", value_parser = header_wanted)]
    pub header: Vec<HeaderWanted>,
}

#[derive(Args, Debug)]
pub struct List {
    #[command(flatten)]
    pub source: Source,

    /// At most so many, the newest
    #[arg(long, short = 'n', default_value_t = 20, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub limit: u32,

    #[command(flatten)]
    pub which: Which,
}

#[derive(Args, Debug)]
pub struct Show {
    /// The topic; any will do
    pub topic: String,

    /// Which, as PARTITION@OFFSET
    #[arg(required = true, value_name = "PARTITION@OFFSET")]
    pub places: Vec<Place>,

    /// Does not cut what is long
    #[arg(long)]
    pub full: bool,
}

#[derive(Args, Debug)]
pub struct Stats {
    #[command(flatten)]
    pub source: Source,

    /// At most so many lines of each kind
    #[arg(long, default_value_t = 10, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..))]
    pub top: u16,

    #[command(flatten)]
    pub which: Which,
}

#[derive(Args, Debug)]
pub struct Export {
    #[command(flatten)]
    pub source: Source,

    /// The file that is written, when all is read; standard output without
    #[arg(long, value_name = "FILE", conflicts_with = "elasticsearch")]
    pub to: Option<PathBuf>,

    /// Says how many letters there are, and writes none
    #[arg(long)]
    pub dry_run: bool,

    #[command(flatten)]
    pub into: Elasticsearch,

    #[command(flatten)]
    pub which: Which,
}

/// Where letters become documents, and how.
#[derive(Args, Debug)]
#[command(next_help_heading = "Into Elasticsearch")]
pub struct Elasticsearch {
    /// Address of Elasticsearch 7.8 or later, or of OpenSearch, e.g. https://search:9200
    // Without a parser: an error would quote it, and people write passwords into addresses.
    #[arg(long, value_name = "URL")]
    pub elasticsearch: Option<String>,

    /// The index, or an alias of one; not a data stream, whose documents cannot be overwritten
    #[arg(long, value_name = "NAME", default_value = "dead-letters")]
    pub index: IndexName,

    /// A file with a line api-key=…, or with user=… and password=…. Else from the variables ELASTICSEARCH_API_KEY, or
    /// ELASTICSEARCH_USER and ELASTICSEARCH_PASSWORD
    #[arg(long, value_name = "FILE", requires = "elasticsearch")]
    pub credentials: Option<PathBuf>,

    /// PEM file with the certificates of the authorities that are trusted to sign the server's [default: the public ones]
    #[arg(long, value_name = "FILE", requires = "elasticsearch")]
    pub ca: Option<PathBuf>,

    /// Goes on until it is stopped
    #[arg(long, requires = "elasticsearch", conflicts_with = "dry_run")]
    pub follow: bool,

    /// How long a server, with --follow also brokers, may be away [default: 10m; with --follow as long as it takes]
    #[arg(long, value_name = "TIME", requires = "elasticsearch", value_parser = time::duration)]
    pub wait: Option<Duration>,

    /// Headers and value too, cut at 1 and 8 KiB. They are kept in the document, and not searchable
    #[arg(long, requires = "elasticsearch")]
    pub payload: bool,

    /// The group whose commits are the position [default: <TOPIC>.export.<INDEX>]. With a filter there is none unless
    /// it is named here: letters that another filter means would be passed over
    #[arg(long, value_name = "GROUP", requires = "elasticsearch")]
    pub group: Option<String>,

    /// Writes all letters again, whatever the position is
    #[arg(long, requires = "elasticsearch")]
    pub from_start: bool,

    /// Puts the template also where the index exists. What an index has learnt already stays as it is
    #[arg(long, requires = "elasticsearch", conflicts_with = "dry_run")]
    pub put_template: bool,

    /// Prints the template of the index, `reliable-consumer.<INDEX>`, asks nobody, and ends
    #[arg(long)]
    pub print_template: bool,
}

#[derive(Args, Debug)]
pub struct Redrive {
    #[command(flatten)]
    pub source: Source,

    /// A topic that records may be sent back to; it has to exist. May be repeated
    #[arg(long, value_name = "TOPIC")]
    pub to: Vec<String>,

    /// A regular expression for the whole names of such topics. May be repeated
    #[arg(long, value_name = "PATTERN")]
    pub to_pattern: Vec<String>,

    /// A topic in which another system has records wait for a retry: never sent to, whatever --to-pattern says. This
    /// library's own are known by their names. May be repeated
    #[arg(long, value_name = "TOPIC")]
    pub retry_topic: Vec<String>,

    #[command(flatten)]
    pub filter: Filter,

    /// Records that have been back so often are parked
    #[arg(long, value_name = "NUMBER", default_value_t = 5)]
    pub threshold: u32,

    /// At most so many records a second
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..))]
    pub rate: Option<u32>,

    /// Where letters go that are not sent back [default: <TOPIC>.parked]
    #[arg(long, value_name = "TOPIC")]
    pub parking_lot: Option<String>,

    /// For which group records go back, whatever their letters say: others on the topic pass them over
    #[arg(long, value_name = "GROUP")]
    pub for_group: Option<String>,

    /// To topics of their own, <topic>.<group>.redrive, for groups that don't use this library
    #[arg(long)]
    pub topic_per_group: bool,

    /// Goes on until it is stopped, and does not ask
    #[arg(long, conflicts_with_all = ["dry_run", "origin", "kind", "since", "until", "key", "header"])]
    pub follow: bool,

    /// Says what would be done, and changes nothing
    #[arg(long)]
    pub dry_run: bool,

    /// Does not ask. Else more than 100 letters are dealt with only if somebody says yes
    #[arg(long, short)]
    pub yes: bool,
}

#[derive(Args, Debug)]
pub struct Move {
    /// Which, as PARTITION@OFFSET
    #[arg(required = true, value_name = "PARTITION@OFFSET")]
    pub places: Vec<Place>,

    /// Says what would be done, and changes nothing
    #[arg(long)]
    pub dry_run: bool,

    /// Does not ask. More than 100 letters are moved only if somebody says yes
    #[arg(long, short)]
    pub yes: bool,
}

#[derive(Args, Debug)]
pub struct Park {
    #[command(flatten)]
    pub source: Source,

    #[command(flatten)]
    pub which: Move,

    /// Where to [default: <TOPIC>.parked]
    #[arg(long, value_name = "TOPIC")]
    pub parking_lot: Option<String>,
}

#[derive(Args, Debug)]
pub struct Unpark {
    #[command(flatten)]
    pub source: Source,

    #[command(flatten)]
    pub which: Move,

    /// Where to [default: TOPIC without its ending .parked]
    #[arg(long, value_name = "TOPIC")]
    pub dlq: Option<String>,
}

#[derive(Args, Debug)]
pub struct Lag {
    /// The consumer group
    pub group: String,

    /// These topics only. Without, all in which the group has committed something. May be repeated
    #[arg(long, value_name = "TOPIC")]
    pub topic: Vec<String>,

    /// Who is in the group, and which partitions each member has, instead
    #[arg(long, conflicts_with_all = ["topic", "max_age"])]
    pub members: bool,

    /// Ends with exit code 6 if an unfinished record is older, e.g. 5m; with 1 if none is known to be, and some are not known
    #[arg(long, value_name = "TIME", value_parser = time::duration)]
    pub max_age: Option<Duration>,
}

#[derive(Debug, Subcommand)]
pub enum Topics {
    /// Makes what a topic's dead letters need, with settings under which none is lost
    ///
    /// The dead-letter topic, the parking lot, and the retry tiers if any are named. What exists is left as it is, and
    /// what is unsafe about it is said.
    ///
    /// All get replicas as below, min.insync.replicas one less, cleanup.policy=delete (compaction would keep one letter of
    /// a key), unclean.leader.election.enable=false, and room for the largest record of the topic with its headers
    /// (max.message.bytes). Dead letters and parked ones are kept for ever unless told otherwise.
    #[command(after_help = CODES)]
    CreateDlq(CreateDlq),
}

#[derive(Args, Debug)]
pub struct CreateDlq {
    /// The topic whose records fail
    pub topic: String,

    /// The dead-letter topic [default: <TOPIC>.dlq]
    #[arg(long, value_name = "TOPIC")]
    pub dlq: Option<String>,

    /// The parking lot [default: <dead-letter topic>.parked]
    #[arg(long, value_name = "TOPIC")]
    pub parking_lot: Option<String>,

    /// Retry tiers, e.g. 10s,1m,10m: topics <TOPIC>.retry.10s and so on
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = time::tier)]
    pub tiers: Vec<String>,

    /// How many each has [default: as many as TOPIC]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(i32).range(1..=10_000))]
    pub partitions: Option<i32>,

    /// Copies of each record [default: 3, or as many brokers as there are]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(i32).range(1..=32))]
    pub replication: Option<i32>,

    /// How long letters are kept, e.g. 90d [default: for ever]
    #[arg(long, value_name = "TIME", value_parser = time::duration)]
    pub retention: Option<Duration>,

    /// How long records of tiers are kept: longer than the consumer is ever away
    #[arg(long, value_name = "TIME", default_value = "30d", value_parser = time::duration)]
    pub tier_retention: Duration,

    /// Says what would be made, with the brokers' consent, and makes nothing
    #[arg(long)]
    pub dry_run: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_are_sound_and_each_tells_the_exit_codes() {
        fn told(command: &mut clap::Command, path: &str) {
            let path = format!("{path} {}", command.get_name());
            let help = command.render_long_help().to_string();
            assert!(
                help.contains("Exit codes") || path.ends_with("completions"),
                "{path}"
            );
            command.get_subcommands_mut().for_each(|it| told(it, &path));
        }
        let mut command = <Arguments as clap::CommandFactory>::command();
        command.clone().debug_assert();
        told(&mut command, "");
    }
}
