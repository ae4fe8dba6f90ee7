//! Redis, PostgreSQL, MariaDB and OpenSearch for tests: found through the environment, or started from the system's
//! packages, OpenSearch by `scripts/opensearch`.

use std::{
    env, fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::{fs::chown, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

use crate::{
    cluster::{PATIENCE, is_set, run},
    unique,
};

const OPENSEARCH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/opensearch");

/// What can be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServiceKind {
    /// With an append-only file that is synced before each answer.
    Redis,
    Postgres,
    MariaDb,
    /// Which answers as Elasticsearch does.
    OpenSearch,
    /// In front of a PostgreSQL, see [`own_pooler`].
    PgBouncer,
}

/// A server on loopback, or the one that the environment names.
pub struct Service {
    kind: ServiceKind,
    url: String,
    own: Option<Own>,
}

/// A server that was started here.
struct Own {
    port: u16,
    directory: PathBuf,
    /// Ends the server when its standard input does, so that no end of this process leaves one behind.
    guard: Option<Child>,
}

/// The server of this kind that all tests of this process share: the one at `REDIS_URL`, `POSTGRES_URL`, `MYSQL_URL` or
/// `OPENSEARCH_URL`, else one of our own.
///
/// `None`, with a line that says so, where its package is not installed: the test is skipped. With
/// `RELIABLE_CONSUMER_REQUIRE_SERVICES=1` (`scripts/test` sets it) that is a failure instead.
///
/// OpenSearch needs what a cluster of one's own needs, and is started where [`own_cluster`](crate::own_cluster) starts one.
pub fn service(kind: ServiceKind) -> Option<&'static Service> {
    static SHARED: [OnceLock<Option<Service>>; 5] = [const { OnceLock::new() }; 5];
    let shared = SHARED[kind as usize].get_or_init(|| {
        let url = env::var(kind.variable()).ok().filter(|it| !it.is_empty());
        match url {
            Some(url) => Some(Service {
                kind,
                url,
                own: None,
            }),
            None => own_service(kind),
        }
    });
    shared.as_ref()
}

/// A server of the test's own, which it may stop and start. Skipped where [`service`] is.
pub fn own_service(kind: ServiceKind) -> Option<Service> {
    begin(kind, |directory, _| kind.prepare(directory))
}

/// A PostgreSQL that follows this one, which was started here, as its standby: `SELECT pg_promote()` ends that.
pub fn own_standby(of: &Service) -> Option<Service> {
    let kind = ServiceKind::Postgres;
    let primary = of.port();
    begin(kind, |directory, _| {
        let data = directory.join("data");
        let arguments = vec![
            "--host=127.0.0.1".to_owned(),
            format!("--port={primary}"),
            "--username=postgres".to_owned(),
            format!("--pgdata={}", data.display()),
            "--write-recovery-conf".to_owned(),
            "--checkpoint=fast".to_owned(),
            "--no-sync".to_owned(),
        ];
        let command = kind.as_user("pg_basebackup", arguments);
        run(Command::new(&command[0])
            .args(&command[1..])
            .current_dir(directory));
    })
}

/// PgBouncer in transaction mode in front of a PostgreSQL that was started here: each transaction gets whichever of four
/// connections is free. Skipped where it is not installed.
pub fn own_pooler(of: &Service) -> Option<Service> {
    let server = of.port();
    begin(ServiceKind::PgBouncer, |directory, port| {
        let settings = format!(
            "[databases]\n* = host=127.0.0.1 port={server} user=postgres\n\
             [pgbouncer]\nlisten_addr=127.0.0.1\nlisten_port={port}\nunix_socket_dir=\nauth_type=any\n\
             pool_mode=transaction\ndefault_pool_size=4\nmax_client_conn=200\n\
             ignore_startup_parameters=extra_float_digits\n"
        );
        let file = directory.join("settings.ini");
        fs::write(file, settings).expect("the directory is ours");
    })
}

fn begin(kind: ServiceKind, prepare: impl FnOnce(&Path, u16)) -> Option<Service> {
    if kind.program().is_none() {
        let missing = format!("install {} or set {}", kind.packages(), kind.variable());
        assert!(
            kind == ServiceKind::OpenSearch || !is_set("RELIABLE_CONSUMER_REQUIRE_SERVICES"),
            "RELIABLE_CONSUMER_REQUIRE_SERVICES=1, but a service is missing: {missing}"
        );
        println!("skipped: {missing}");
        return None;
    }
    let directory = env::temp_dir().join(unique("reliable-consumer"));
    fs::create_dir(&directory).expect("a directory can be made for the service");
    if let Some(user) = kind.user() {
        let id = |of: &str| {
            let output = run(Command::new("id").args([of, user]));
            output.trim().parse().expect("id prints a number")
        };
        chown(&directory, Some(id("-u")), Some(id("-g"))).expect("root may give directories away");
    }
    let port = TcpListener::bind(("127.0.0.1", 0))
        .and_then(|it| it.local_addr())
        .expect("loopback has free ports")
        .port();
    prepare(&directory, port);
    let mut service = Service {
        kind,
        url: kind.url(port),
        own: Some(Own {
            port,
            directory,
            guard: None,
        }),
    };
    service.start();
    Some(service)
}

impl Service {
    /// Where it is, as the clients take it: `redis://…`, `postgres://…`, `mysql://…`, `http://…`.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Where a server that was started here listens.
    pub fn port(&self) -> u16 {
        let own = self.own.as_ref();
        own.expect("only a server of the test's own is known by its port")
            .port
    }

    /// Ends the server as a crash does. What it had made durable is there after [`start`](Self::start).
    pub fn stop(&mut self) {
        let guard = self.own_mut().guard.take();
        end(guard.expect("the server runs"), b"keep\n");
    }

    /// Stops the server's process as it is, connections and all: it is there and does not answer. Returns when it has come
    /// to a stop. Of Redis, which is one process.
    pub fn freeze(&mut self) {
        self.tell(b"freeze\n");
    }

    /// Has it go on, with what it was sent meanwhile.
    pub fn thaw(&mut self) {
        self.tell(b"thaw\n");
    }

    /// Has a Redis that was started here sync its file once a second, for tests that are not about what it forgets.
    pub fn sync_seldom(&self) {
        let Some(own) = &self.own else { return };
        let mut answer = [0; 3];
        let mut stream = TcpStream::connect(("127.0.0.1", own.port)).expect("it runs");
        stream
            .write_all(b"CONFIG SET appendfsync everysec\r\n")
            .and_then(|()| stream.read_exact(&mut answer))
            .expect("it answers");
        assert_eq!(&answer, b"+OK");
    }

    fn tell(&mut self, word: &[u8]) {
        let guard = self.own_mut().guard.as_mut();
        let guard = guard.expect("the server runs");
        let (input, output) = (guard.stdin.as_mut(), guard.stdout.as_mut());
        let told = input.expect("it is a pipe").write_all(word);
        told.expect("its guard reads what it is told");
        // Until then it has been written to a pipe, and no more.
        let done = output.expect("it is a pipe").read_exact(&mut [0]);
        done.expect("its guard says when it is done");
    }

    /// Starts it on its port again, and waits until it answers.
    pub fn start(&mut self) {
        let kind = self.kind;
        let own = self.own_mut();
        assert!(own.guard.is_none(), "the server runs already");
        let log = fs::File::create(own.directory.join("log")).expect("the directory is ours");
        // The shell does what it is told and says when it is done, until the end of its input, whichever way this process
        // ends. A process has stopped some time after the signal was sent.
        let script = r#"signal=$1 directory=$2; shift 2
            "$@" </dev/null >&2 & server=$!
            while read -r word; do
                case $word in
                    freeze)
                        kill -STOP "$server"
                        status=/proc/$server/status
                        while [ -r "$status" ] && ! grep -q '^State:[[:space:]]*T' "$status"; do :; done ;;
                    thaw) kill -CONT "$server" ;;
                    *) break ;;
                esac
                echo
            done
            kill -"$signal" "$server"; kill -CONT "$server"; wait "$server"
            [ "$word" = keep ] || rm -rf "$directory""#;
        let guard = Command::new("sh")
            .args(["-c", script, "guard", kind.crash()])
            .arg(&own.directory)
            .args(kind.command(&own.directory, own.port))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            // Not in the terminal's group: an interrupt would end the shell before it has cleaned up.
            .process_group(0)
            .spawn()
            .expect("sh is everywhere");
        own.guard = Some(guard);
        let start = Instant::now();
        while !kind.answers(own.port) {
            if start.elapsed() > kind.patience() {
                let log = fs::read_to_string(own.directory.join("log")).unwrap_or_default();
                panic!("waited in vain for {kind:?} to answer: {log}");
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn own_mut(&mut self) -> &mut Own {
        self.own
            .as_mut()
            .expect("only a server of the test's own can be stopped, started and frozen")
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if let Some(own) = &mut self.own {
            match own.guard.take() {
                Some(guard) => end(guard, b""),
                None => drop(fs::remove_dir_all(&own.directory)),
            }
        }
    }
}

/// Lets the guard end its server, and waits for both.
fn end(mut guard: Child, word: &[u8]) {
    if let Some(mut input) = guard.stdin.take() {
        let _ = input.write_all(word);
    }
    let _ = guard.wait();
}

impl ServiceKind {
    fn variable(self) -> &'static str {
        match self {
            Self::Redis => "REDIS_URL",
            Self::Postgres => "POSTGRES_URL",
            Self::MariaDb => "MYSQL_URL",
            Self::OpenSearch => "OPENSEARCH_URL",
            Self::PgBouncer => "PGBOUNCER_URL",
        }
    }

    fn packages(self) -> &'static str {
        match self {
            Self::Redis => "redis-server",
            Self::Postgres => "postgresql",
            Self::MariaDb => "mariadb-server",
            Self::PgBouncer => "pgbouncer",
            Self::OpenSearch => {
                "default-jdk-headless and maven with RELIABLE_CONSUMER_OWN_CLUSTERS=1"
            }
        }
    }

    /// How long it may take to answer.
    fn patience(self) -> Duration {
        match self {
            // A virtual machine that compiles while it begins.
            Self::OpenSearch => 4 * PATIENCE,
            _ => PATIENCE,
        }
    }

    fn program(self) -> Option<PathBuf> {
        match self {
            Self::Redis => find("redis-server"),
            Self::Postgres => find("postgres"),
            Self::PgBouncer => find("pgbouncer"),
            Self::MariaDb => find("mariadbd").or_else(|| find("mysqld")),
            Self::OpenSearch => {
                is_set("RELIABLE_CONSUMER_OWN_CLUSTERS").then(|| PathBuf::from(OPENSEARCH))
            }
        }
    }

    fn url(self, port: u16) -> String {
        match self {
            Self::Redis => format!("redis://127.0.0.1:{port}/"),
            Self::Postgres | Self::PgBouncer => {
                format!("postgres://postgres@127.0.0.1:{port}/postgres")
            }
            Self::MariaDb => format!("mysql://root@127.0.0.1:{port}/test"),
            Self::OpenSearch => format!("http://127.0.0.1:{port}"),
        }
    }

    /// Whom to run it as when we are root: the databases refuse to be root.
    fn user(self) -> Option<&'static str> {
        let root = fs::metadata("/proc/self").is_ok_and(|it| {
            use std::os::unix::fs::MetadataExt;
            it.uid() == 0
        });
        match self {
            Self::Redis | Self::OpenSearch => None,
            Self::Postgres | Self::PgBouncer => root.then_some("postgres"),
            Self::MariaDb => root.then_some("mysql"),
        }
    }

    /// The signal that ends it without an orderly shutdown. PostgreSQL has one of its own for that, which takes its
    /// processes along.
    fn crash(self) -> &'static str {
        match self {
            Self::Postgres => "QUIT",
            Self::Redis | Self::MariaDb | Self::OpenSearch | Self::PgBouncer => "KILL",
        }
    }

    fn prepare(self, directory: &Path) {
        let data = directory.join("data");
        let (program, arguments) = match self {
            Self::Redis => return fs::create_dir(data).expect("the directory is ours"),
            Self::PgBouncer => panic!("it stands in front of a server: `own_pooler`"),
            // Once and for all, and not while somebody waits for an answer.
            Self::OpenSearch => return drop(run(Command::new(OPENSEARCH).arg("download"))),
            Self::Postgres => (
                "initdb",
                vec![
                    format!("--pgdata={}", data.display()),
                    "--username=postgres".to_owned(),
                    "--auth=trust".to_owned(),
                    "--encoding=UTF8".to_owned(),
                    "--no-sync".to_owned(),
                ],
            ),
            Self::MariaDb => (
                "mariadb-install-db",
                vec![
                    "--no-defaults".to_owned(),
                    format!("--datadir={}", data.display()),
                    "--auth-root-authentication-method=normal".to_owned(),
                ],
            ),
        };
        let command = self.as_user(program, arguments);
        run(Command::new(&command[0])
            .args(&command[1..])
            .current_dir(directory));
    }

    fn command(self, directory: &Path, port: u16) -> Vec<String> {
        let directory = directory.display();
        let arguments: Vec<String> = match self {
            Self::Redis => [
                format!("--port {port}"),
                "--bind 127.0.0.1".to_owned(),
                format!("--dir {directory}/data"),
                "--appendonly yes".to_owned(),
                "--appendfsync always".to_owned(),
            ]
            .iter()
            .flat_map(|it| it.split(' ').map(str::to_owned))
            .chain(["--save".to_owned(), String::new()])
            .collect(),
            Self::Postgres => vec![
                "-D".to_owned(),
                format!("{directory}/data"),
                format!("--port={port}"),
                "--listen_addresses=127.0.0.1".to_owned(),
                "--unix_socket_directories=".to_owned(),
                "--max_connections=600".to_owned(),
            ],
            Self::MariaDb => vec![
                "--no-defaults".to_owned(),
                format!("--datadir={directory}/data"),
                format!("--port={port}"),
                "--bind-address=127.0.0.1".to_owned(),
                format!("--socket={directory}/socket"),
                format!("--pid-file={directory}/pid"),
                "--max-connections=600".to_owned(),
                "--innodb-buffer-pool-size=64M".to_owned(),
            ],
            Self::PgBouncer => vec!["-q".to_owned(), format!("{directory}/settings.ini")],
            Self::OpenSearch => {
                vec!["run".to_owned(), directory.to_string(), port.to_string()]
            }
        };
        let program = self.program().expect("it was there when it was prepared");
        self.as_user(&program.to_string_lossy(), arguments)
    }

    fn as_user(self, program: &str, arguments: Vec<String>) -> Vec<String> {
        let program =
            find(program).unwrap_or_else(|| panic!("{program} comes with {}", self.packages()));
        let mut command = Vec::new();
        if let Some(user) = self.user() {
            command.extend([
                "setpriv".to_owned(),
                format!("--reuid={user}"),
                format!("--regid={user}"),
                "--clear-groups".to_owned(),
            ]);
        }
        command.push(program.to_string_lossy().into_owned());
        command.extend(arguments);
        command
    }

    /// Whether it takes commands; a port that is open is not enough.
    fn answers(self, port: u16) -> bool {
        let client = |program: &str, arguments: &[String]| {
            let program = find(program).expect("the client comes with the server");
            let mut command = Command::new(program);
            command
                .args(arguments)
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            command.status().is_ok_and(|it| it.success())
        };
        match self {
            Self::Redis => TcpStream::connect(("127.0.0.1", port)).is_ok_and(|mut stream| {
                let mut answer = [0; 5];
                stream.write_all(b"PING\r\n").is_ok()
                    && stream.read_exact(&mut answer).is_ok()
                    && &answer == b"+PONG"
            }),
            Self::OpenSearch => TcpStream::connect(("127.0.0.1", port)).is_ok_and(|mut stream| {
                let mut answer = [0; 12];
                let _ = stream.set_read_timeout(Some(PATIENCE));
                stream
                    .write_all(b"GET /_cluster/health HTTP/1.0\r\n\r\n")
                    .is_ok()
                    && stream.read_exact(&mut answer).is_ok()
                    && answer.ends_with(b" 200")
            }),
            Self::Postgres | Self::PgBouncer => client(
                "pg_isready",
                &["--host=127.0.0.1".to_owned(), format!("--port={port}")],
            ),
            Self::MariaDb => client(
                "mariadb-admin",
                &[
                    "--no-defaults".to_owned(),
                    "--host=127.0.0.1".to_owned(),
                    format!("--port={port}"),
                    "--user=root".to_owned(),
                    "ping".to_owned(),
                ],
            ),
        }
    }
}

/// A program on the path, or where Debian keeps those that it does not put there.
fn find(program: &str) -> Option<PathBuf> {
    if Path::new(program).is_absolute() {
        return Some(program.into());
    }
    let path = env::var_os("PATH").unwrap_or_default();
    let mut directories: Vec<PathBuf> = env::split_paths(&path).collect();
    directories.push("/usr/sbin".into());
    let mut versions: Vec<PathBuf> = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .map(|it| it.path().join("bin"))
        .collect();
    versions.sort();
    directories.extend(versions.into_iter().rev());
    directories
        .into_iter()
        .map(|it| it.join(program))
        .find(|it| it.is_file())
}
