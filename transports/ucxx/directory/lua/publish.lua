-- Declaring and writing.

-- The largest group, of several the one whose name comes first, and its rows; '', 0 where there is none.
local function largest_group(K)
  local flat, name, rows = redis.call('HGETALL', K .. 'g'), '', 0
  for j = 1, #flat, 2 do
    local n = unpack_(flat[j + 1])[ROWS]
    if n > rows or (n == rows and flat[j] < name) then name, rows = flat[j], n end
  end
  return name, rows
end

-- Payload: {doc, gsize, nt, anew}. ARGV[3] is the version that the declaration was united with; '0': there was no partition.
-- anew: types and group size are not those of the version before, which only a partition without rows allows.
local function register(K, P, args, now)
  if P and P.ver ~= args[3] then return schema(P) end
  if not P and args[3] ~= '0' then return { UNKNOWN, '' } end
  local a = unpack_(args[4])
  local had = P and P.gsize
  if P and a[4] then
    if entries(K .. 'i') > 0 then return { ERROR, pack({ '', 0 }) } end
  elseif P and not had and a[2] > 0 then
    local name, rows = largest_group(K)
    if rows > a[2] then return { ERROR, pack({ name, rows }) } end
  end
  P = P or fresh(K, now)
  if tonumber(P.ver) == 0 then redis.call('HSET', K .. 'p', 'born', string.format('%.0f', now)) end
  set_schema(P, a[1], a[2], a[3])
  if P.gsize ~= had then regroup(P) end
  save(P)
  notify(K)
  return { OK, P.ver }
end

local function describe(K, P)
  if not P then return { UNKNOWN, '' } end
  local v = redis.call('HMGET', K .. 'p', 'doc', 'born')
  return { OK, pack({ P.ver, v[1], v[2], entries(K .. 'i'), string.format('%.0f', P.bytes) }) }
end

-- Payload: ids. How many of them are new, beside how many samples are there.
local function place(K, P, args)
  if not P then return args[3] == '0' and { OK, pack({ 0, #unpack_(args[4]) }) } or { UNKNOWN, '' } end
  if P.ver ~= args[3] then return schema(P) end
  local rids, new = hmget(K .. 'i', unpack_(args[4])), 0
  for _, rid in ipairs(rids) do if not rid then new = new + 1 end end
  return { OK, pack({ entries(K .. 'i'), new }) }
end

-- What new cells replace: returns the row's cells, the bytes that went, and adds what died to `dead`.
local function replace_cells(old, new, dead)
  local gone, out, bytes = {}, unpack_(new), 0
  for _, piece in ipairs(out) do
    for _, f in ipairs(piece[3]) do gone[f] = true end
  end
  for _, piece in ipairs(unpack_(old)) do
    local fields, sizes, lost = {}, {}, {}
    for j, f in ipairs(piece[3]) do
      if gone[f] then
        lost[#lost + 1] = f
        bytes = bytes + piece[4][j]
      else
        fields[#fields + 1] = f
        sizes[#sizes + 1] = piece[4][j]
      end
    end
    if #fields == 0 then
      dead[#dead + 1] = { piece[1], piece[2], false }
    else
      if #lost > 0 then dead[#dead + 1] = { piece[1], piece[2], lost } end
      out[#out + 1] = { piece[1], piece[2], fields, sizes }
    end
  end
  return pack(out), bytes
end

-- The rows that a put names and that exist already, by position.
local function load_old(P, rids)
  local at, ask, old = {}, {}, {}
  for i, rid in ipairs(rids) do if rid then at[#at + 1] = i; ask[#ask + 1] = rid end end
  for j, blob in ipairs(load_rows(P.K, ask)) do old[at[j]] = unpack_(blob) end
  return old
end

local function check_groups(P, a, old, groups)
  local sizes = {}
  for i, name in ipairs(a.groups) do
    local expected = a.exp and a.exp[i]
    if expected and expected > P.gsize then return { 'expected', i, expected, P.gsize } end
    local row = old[i]
    if not row or (a.told and a.told[i] > 0 and name ~= row[GROUP]) then
      sizes[name] = (sizes[name] or groups[name][ROWS]) + 1
      if sizes[name] > P.gsize then return { 'group', i, sizes[name], P.gsize } end
    end
  end
  return nil
end

local ROW_HEAD, PART_HEAD = '\157', '\150' -- of msgpack arrays of 13 and 6

-- Merges what a put says about a row that exists into it. COMMITTED is 2 where it is tagged so that it is not. The row joins the
-- group it is told.
local function stamp(P, a, i, seq, rid, row, groups)
  if a.com and a.com[i] > 0 then row[COMMITTED] = a.com[i] end
  if a.st and a.st[i] > 0 then row[FAILED] = a.st[i] == 1 and 1 or 0 end
  if a.cr and a.cr[i] then row[CREATED] = a.cr[i] end
  if a.told and a.told[i] == 2 and a.groups[i] ~= row[GROUP] then
    if row[ID] == row[GROUP] then groups[row[GROUP]][OWN] = false end
    leave(P, groups[row[GROUP]], row[GROUP], { [rid] = true }, 1)
    row[GROUP] = a.groups[i]
    groups[row[GROUP]] = groups[row[GROUP]] or no_group()
    join(P, groups[row[GROUP]], row[GROUP], rid, row[ID])
  end
  if a.exp and a.exp[i] then row[EXPECTED] = math.max(a.exp[i], 0) end
  local g = groups[row[GROUP]]
  if row[EXPECTED] > g[EXPECT] then g[EXPECT] = row[EXPECTED] end
  note_failed(P, g, rid, row[FAILED] == 1)
  if row[COMMITTED] == 2 or row[FAILED] == 1 then
    row[ELIGIBLE] = 0
  elseif row[ELIGIBLE] == 0 then
    row[ELIGIBLE] = seq
  end
end

-- What a put has for a row: its cells, tags and bytes, the first two false where there are none.
local function part_of(a, i)
  local _, _, bytes, _, cells, tags = unpack(unpack_(PART_HEAD .. a.parts[i]))
  return cells, tags, bytes
end

-- Writes a put's cells, words and tags into a row that exists; returns by how many bytes the row grew.
local function rewrite(P, a, i, seq, rid, row, groups, dead)
  local cells, tags, grown = part_of(a, i)
  local told = cells or (a.com and a.com[i] > 0) or (a.st and a.st[i] > 0) or (a.told and a.told[i] == 2)
  if told then count_row(groups[row[GROUP]], row, homes_of(P, pieces_of(row[CELLS])), -1) end
  if cells then
    for _, f in ipairs(a.shapes[a.shape and a.shape[i] or 1]) do
      if not row[PROD][f] then row[PROD][f] = seq end
    end
    if row[CELLS] then
      local went
      cells, went = replace_cells(row[CELLS], cells, dead)
      grown = grown - went
    end
    row[CELLS] = cells
    row[BYTES] = row[BYTES] + grown
  end
  stamp(P, a, i, seq, rid, row, groups)
  if told then count_row(groups[row[GROUP]], row, homes_of(P, pieces_of(row[CELLS])), 1) end
  if tags then row[TAGS] = row[TAGS] and splice(row[TAGS], tags) or tags end
  return grown
end

-- What rows that a put makes have in common: `row` has what indexes look at, `tail` the packed row from OWNER on, `homes` where
-- it lies, `alone` how many of them are groups of their own.
local function kind_of(a, seq, shape, held, failed, expected, created)
  local prod, row = {}, {}
  for _, f in ipairs(a.shapes and a.shapes[shape] or {}) do prod[f] = seq end
  row[CREATED], row[ELIGIBLE], row[COMMITTED] = created, (held or failed) and 0 or seq, held and 2 or 1
  row[FAILED], row[EXPECTED], row[PROD] = failed and 1 or 0, expected, prod
  local tail = pack(a.owner, created, row[ELIGIBLE], row[COMMITTED], row[FAILED], expected, prod)
  return { row = row, homes = a.homes and a.homes[shape] or {}, alone = 0, tail = tail }
end

-- The kind of a put's row that is new, of those that there are already or another one.
local function kind_at(a, i, seq, now, kinds)
  local held, failed = a.com and a.com[i] == 2, a.st and a.st[i] == 1
  local expected, created = a.exp and a.exp[i] and math.max(a.exp[i], 0) or 0, a.cr and a.cr[i]
  local shape = a.shapes and (a.shape and a.shape[i] or 1) or 0
  local number = shape * 4 + (held and 2 or 0) + (failed and 1 or 0)
  local some = kinds[expected] or {}
  kinds[expected] = some
  if created or not some[number] then
    local kind = kind_of(a, seq, shape, held, failed, expected, created or now)
    kinds.all[#kinds.all + 1] = kind
    if created then return kind end
    some[number] = kind
  end
  return some[number]
end

-- Which rows a put may write by the lives that it is bound to, and which not; by position. Without a life any will do.
local function bound(a, rids)
  local keep, unfit = {}, {}
  for i = 1, #a.ids do
    local life, fits = a.lives and a.lives[i], rids[i]
    if a.only == 'new' then fits = not fits elseif fits and life then fits = life == rids[i] end
    if fits then keep[#keep + 1] = i else unfit[#unfit + 1] = i end
  end
  return keep, unfit
end

-- The columns that have an entry per row.
local COLUMNS = { 'ids', 'groups', 'told', 'exp', 'com', 'st', 'cr', 'parts', 'bytes', 'shape' }

-- Leaves rows out of a put; what was written for them dies.
local function leave_out(a, keep, unfit, dead)
  for _, i in ipairs(unfit) do
    for _, piece in ipairs(pieces_of((part_of(a, i)))) do
      dead[#dead + 1] = { piece[1], piece[2], false }
    end
  end
  for _, name in ipairs(COLUMNS) do
    local column = a[name]
    if type(column) == 'table' then
      local kept = {}
      for j, i in ipairs(keep) do kept[j] = column[i] end
      a[name] = kept
    end
  end
end

-- The answer of a put of n rows: their incarnations, from `first` on where all are new, and which of them are new; the
-- version of the schema, where it may have changed.
local function published(P, n, first, rids, new, dead, ver)
  return { OK, pack({ first and string.format('%.0f', first) or false, n, rids, new, dead, ver, moved_at(P) }) }
end

-- Payload: columns over the rows (absent where they say nothing), see publishing.py. Checked first, then changed.
local function publish(K, P, args, now)
  if not P then
    if args[3] ~= '0' then return { UNKNOWN, '' } end
    P = fresh(K, now)
  elseif P.ver ~= args[3] then
    return schema(P)
  end
  local a = unpack_(args[4])
  a.groups = a.groups or a.ids
  local total, at, dead = #a.ids, nil, {} -- at: the position in the put of each row that is written, where not all are
  local rids = hmget(K .. 'i', a.ids)
  if a.only then
    local keep, unfit = bound(a, rids)
    if #unfit > 0 then
      if a.only == 'new' or not a.skip then return { ERROR, pack({ 'bound', unfit }) } end
      leave_out(a, keep, unfit, dead)
      local found = rids
      at, rids = keep, {}
      for j, i in ipairs(keep) do rids[j] = found[i] end
    end
    -- Remembered: a row that lives by the time when this is sent again is left out as well.
    if #a.ids == 0 then return published(P, total, false, {}, {}, dead, false), false end
    if a.clash then return { ERROR, pack({ 'clash' }) } end
  end
  local n, new = #a.ids, {}
  for i = 1, n do if not rids[i] then new[#new + 1] = i end end
  local held = entries(K .. 'i') + a.elsewhere
  if #new > 0 and held + #new > a.capacity then return { ERROR, pack({ 'full', held, #new }) } end
  local old, groups, rows_of = load_old(P, rids), {}, {}
  local apart = #new == n and a.groups == a.ids and not P.gsize and entries(K .. 'g') == 0 -- no row has a group
  if not apart then
    local names, known = {}, {}
    for i = 1, n do
      local name = a.groups[i]
      names[#names + 1] = name
      rows_of[name] = (rows_of[name] or 0) + 1
      known[a.ids[i]] = old[i] or false
      if old[i] then names[#names + 1] = old[i][GROUP] end
    end
    load_groups(P, names, groups, known)
  end
  if P.gsize then
    local wrong = check_groups(P, a, old, groups)
    if wrong then
      wrong[2] = at and at[wrong[2]] or wrong[2]
      return { ERROR, pack(wrong) }
    end
  end
  -- from here on everything happens
  if a.doc then
    if P.ver == '0' then redis.call('HSET', K .. 'p', 'born', string.format('%.0f', now)) end
    set_schema(P, a.doc, a.gsize, a.nt)
  end
  local first, seq, seconds = P.inc, P.seq + 1, now / 1000000
  local before = not P.gsize and ready_since(P, old)
  local list, groups_of, is_new, added, kinds = {}, {}, {}, 0, { all = {} }
  local set_i, blobs = {}, {}
  local sizes = type(a.bytes) == 'table' and a.bytes
  -- what all rows are alike in, where they are
  local plain = not (a.shape or a.exp or a.com or a.st or a.cr) and n > 0 and kind_at(a, 1, seq, seconds, kinds)
  if #new == n and plain then P.alike = plain.row end
  for k, i in ipairs(new) do
    local id, name = a.ids[i], a.groups[i]
    P.inc = P.inc + 1
    local rid, kind = digits(P.inc), plain or kind_at(a, i, seq, seconds, kinds)
    local row, g = kind.row, groups[name]
    rids[i], is_new[i], list[i], groups_of[i] = rid, true, row, name
    added = added + (sizes and sizes[i] or a.bytes)
    if not g and (apart or name == id and rows_of[name] == 1) and row[EXPECTED] == 0 then
      kind.alone = kind.alone + 1
    else
      g = g or no_group()
      groups[name] = g
      if g[ROWS] == 0 then g.alike = P.alike end
      join(P, g, name, rid, id)
      if row[EXPECTED] > g[EXPECT] then g[EXPECT] = row[EXPECTED] end
      note_failed(P, g, rid, row[FAILED] == 1)
      count_row(g, row, kind.homes, 1)
    end
    set_i[2 * k - 1], set_i[2 * k] = id, rid
    blobs[i] = ROW_HEAD .. a.parts[i] .. kind.tail
  end
  for _, kind in ipairs(kinds.all) do
    if kind.alone > 0 and kind.row[ELIGIBLE] > 0 then count_whole(P, join_homes(kind.homes), kind.alone) end
  end
  for i = 1, n do
    local row = old[i]
    if row then
      added = added + rewrite(P, a, i, seq, rids[i], row, groups, dead)
      list[i], groups_of[i] = row, row[GROUP]
      blobs[i] = pack(row)
    end
  end
  P.seq = seq
  if #dead > 0 then moves(P) end
  P.bytes = P.bytes + added
  if #new > 0 then set_i[#set_i + 1] = PAD; set_i[#set_i + 1] = '' end
  many('HSET', K .. 'i', set_i)
  store_rows(K, rids, blobs)
  save_groups(P, groups)
  touch(P, rids, list, groups_of, is_new, groups, nil, before)
  save(P)
  if #new == total then return published(P, total, first, false, false, dead, P.ver), true end
  if at then
    local written = rids
    rids = {}
    for i = 1, total do rids[i] = false end
    for j, i in ipairs(at) do rids[i] = written[j] end
  end
  return published(P, total, false, rids, new, dead, P.ver), true
end
