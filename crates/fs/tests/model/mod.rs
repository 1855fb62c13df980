//! A model of a filesystem's names in plain maps, to compare with the real one.

use std::collections::BTreeMap;

pub const ENOENT: i32 = 2;
pub const EPERM: i32 = 1;
pub const EEXIST: i32 = 17;
pub const ENOTDIR: i32 = 20;
pub const EISDIR: i32 = 21;
pub const EINVAL: i32 = 22;
pub const ENOTEMPTY: i32 = 39;
pub const ENODATA: i32 = 61;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Node {
    File { size: u64 },
    Symlink { target: String },
    Dir { entries: BTreeMap<String, usize> },
}

#[derive(Clone, Debug)]
pub struct Inode {
    pub node: Node,
    pub perm: u16,
    pub xattrs: BTreeMap<String, Vec<u8>>,
}

/// A path with all attributes that a user can see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    pub kind: &'static str,
    pub perm: u16,
    pub nlink: u32,
    pub size: u64,
    pub target: Option<String>,
    pub xattrs: BTreeMap<String, Vec<u8>>,
    /// First path, in order, of the same inode. Distinguishes hard links from copies.
    pub same_as: String,
}

/// Everything that a user can see.
pub type Dump = BTreeMap<String, Row>;

/// The names.
#[derive(Clone, Debug)]
pub struct Model {
    pub inodes: Vec<Inode>,
}

type Outcome = Result<(), i32>;

impl Model {
    pub fn new() -> Model {
        let node = Node::Dir {
            entries: BTreeMap::new(),
        };
        Model {
            inodes: vec![Inode {
                node,
                perm: 0o755,
                xattrs: BTreeMap::new(),
            }],
        }
    }

    /// Returns the directories that have a path, as path and inode.
    pub fn dirs(&self) -> Vec<(String, usize)> {
        let mut dirs = vec![(String::new(), 0)];
        let mut at = 0;
        while at < dirs.len() {
            let (path, dir) = dirs[at].clone();
            for (name, inode) in self.entries(dir) {
                if matches!(self.inodes[*inode].node, Node::Dir { .. }) {
                    dirs.push((format!("{path}/{name}"), *inode));
                }
            }
            at += 1;
        }
        dirs
    }

    pub fn entries(&self, dir: usize) -> &BTreeMap<String, usize> {
        match &self.inodes[dir].node {
            Node::Dir { entries } => entries,
            _ => panic!("a test asked a file for its entries"),
        }
    }

    fn entries_mut(&mut self, dir: usize) -> &mut BTreeMap<String, usize> {
        match &mut self.inodes[dir].node {
            Node::Dir { entries } => entries,
            _ => panic!("a test asked a file for its entries"),
        }
    }

    pub fn find(&self, dir: usize, name: &str) -> Result<usize, i32> {
        self.entries(dir).get(name).copied().ok_or(ENOENT)
    }

    fn is_dir(&self, inode: usize) -> bool {
        matches!(self.inodes[inode].node, Node::Dir { .. })
    }

    pub fn make(&mut self, dir: usize, name: &str, node: Node, perm: u16) -> Outcome {
        if self.find(dir, name).is_ok() {
            return Err(EEXIST);
        }
        self.inodes.push(Inode {
            node,
            perm,
            xattrs: BTreeMap::new(),
        });
        let inode = self.inodes.len() - 1;
        self.entries_mut(dir).insert(name.into(), inode);
        Ok(())
    }

    pub fn link(&mut self, from: usize, name: &str, to: usize, new: &str) -> Outcome {
        let inode = self.find(from, name)?;
        if self.is_dir(inode) {
            return Err(EPERM);
        }
        if self.find(to, new).is_ok() {
            return Err(EEXIST);
        }
        self.entries_mut(to).insert(new.into(), inode);
        Ok(())
    }

    pub fn unlink(&mut self, dir: usize, name: &str) -> Outcome {
        if self.is_dir(self.find(dir, name)?) {
            return Err(EISDIR);
        }
        self.entries_mut(dir).remove(name);
        Ok(())
    }

    pub fn rmdir(&mut self, dir: usize, name: &str) -> Outcome {
        let inode = self.find(dir, name)?;
        if !self.is_dir(inode) {
            return Err(ENOTDIR);
        }
        if !self.entries(inode).is_empty() {
            return Err(ENOTEMPTY);
        }
        self.entries_mut(dir).remove(name);
        Ok(())
    }

    fn is_within(&self, inode: usize, ancestor: usize) -> bool {
        inode == ancestor
            || (self.is_dir(ancestor)
                && self
                    .entries(ancestor)
                    .values()
                    .any(|child| self.is_within(inode, *child)))
    }

    pub fn rename(&mut self, from: usize, name: &str, to: usize, new: &str, flags: u32) -> Outcome {
        let moved = self.find(from, name)?;
        let other = self.find(to, new).ok();
        if flags == 1 && other.is_some() {
            return Err(EEXIST);
        }
        if flags == 2 && other.is_none() {
            return Err(ENOENT);
        }
        if other == Some(moved) {
            return Ok(());
        }
        if self.is_dir(moved) && self.is_within(to, moved) {
            return Err(EINVAL);
        }
        if let Some(other) = other {
            let above = self.is_dir(other) && self.is_within(from, other);
            if flags == 2 {
                if above {
                    return Err(EINVAL);
                }
                self.entries_mut(from).insert(name.into(), other);
                self.entries_mut(to).insert(new.into(), moved);
                return Ok(());
            }
            match (self.is_dir(moved), self.is_dir(other)) {
                (false, true) => return Err(EISDIR),
                (true, false) => return Err(ENOTDIR),
                (true, true) if !self.entries(other).is_empty() => return Err(ENOTEMPTY),
                _ => {}
            }
        }
        self.entries_mut(from).remove(name);
        self.entries_mut(to).insert(new.into(), moved);
        Ok(())
    }

    pub fn dump(&self) -> Dump {
        let mut links: BTreeMap<usize, Vec<String>> = BTreeMap::new();
        let mut stack = vec![(String::new(), 0)];
        while let Some((path, inode)) = stack.pop() {
            if self.is_dir(inode) {
                for (name, child) in self.entries(inode) {
                    stack.push((format!("{path}/{name}"), *child));
                }
            }
            links.entry(inode).or_default().push(path);
        }
        let mut dump = Dump::new();
        for (inode, mut paths) in links {
            paths.sort();
            let it = &self.inodes[inode];
            let (kind, nlink, size, target) = match &it.node {
                Node::File { size } => ("file", paths.len(), *size, None),
                Node::Symlink { target } => (
                    "symlink",
                    paths.len(),
                    target.len() as u64,
                    Some(target.clone()),
                ),
                Node::Dir { entries } => {
                    let dirs = entries
                        .values()
                        .filter(|child| self.is_dir(**child))
                        .count();
                    ("dir", dirs + 2, entries.len() as u64, None)
                }
            };
            for path in &paths {
                let row = Row {
                    kind,
                    perm: it.perm,
                    nlink: nlink as u32,
                    size,
                    target: target.clone(),
                    xattrs: it.xattrs.clone(),
                    same_as: paths[0].clone(),
                };
                dump.insert(path.clone(), row);
            }
        }
        dump
    }
}
